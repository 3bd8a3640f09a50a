"""Chat templates: equal to transformers' rendering, and every way to misuse one ends in a ValidationError."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.exceptions import ValidationError
from octavo.tokenizer.chat_template import MAX_OUTPUT_CHARS, MAX_TEMPLATE_CHARS, render

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hi 👋\n\n  there  "},
    {
        "role": "assistant",
        "content": "Hello!",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "é"]}}}],
    },
    {"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]},
]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]

TEMPLATES = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{{ m.content }}{{ '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "blocks keep their lines": "  {% if true %}\n  a\n  {% endif %}\n b {% raw %}{{ x }}{% endraw %}\n",
    "tojson": "{{ tools|tojson }}{{ tools | tojson(indent=2) }}{{ messages|tojson(sort_keys=true) }}{{ '<é>'|tojson }}",
    "tojson separators": "{{ messages[2].tool_calls|tojson(separators=(',', ':')) }}{{ 'é'|tojson(true) }}",
    "namespace and macro": """{% macro show(x, sep=', ') %}[{{ x|join(sep) }}]{% endmacro %}
{% set ns = namespace(n=0, text='') %}
{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% set ns.text = ns.text ~ m.role ~ '-' %}{% endfor %}
{{ ns.n }} {{ ns.text }} {{ show(['a', 'b']) }}""",
    "loop controls": """{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index0 }}
{{ loop.length }}{% if m.role == 'assistant' %}{% break %}{% endif %}{% else %}none{% endfor %}""",
    "generation": """{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.role }}{{ x }}
{%- endgeneration %}{{ x }}{% endfor %}""",
    "tests and filters": """{% for m in messages %}
{{ m.content is string }} {{ m.content is iterable }} {{ m.name is defined }} {{ m.role in ['user', 'tool'] }}
{{ m.role|upper|replace('USER', 'u') }} {{ m.content|length }} {{ loop.last }}
{{ loop.previtem.role if not loop.first }}
{% endfor %}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ messages|map(attribute='role')|join('|') }}
{{ 'a b'.split(' ')|reverse|list }} {{ 'x'.strip().startswith('x') }} {{ '  x '|trim }} {{ nothing|default('d') }}
{{ 7 // 2 * 3 % 4 - 2 ** 3 }} {{ 'ab' * 3 }} {{ '%s-%03d' % ('a', 7) }} {{ '{}:{x!r}'.format(1, x='é') }}
{{ messages[1:][::-1]|map(attribute='role')|list }} {{ {'b': 1, 'a': 2}|dictsort }} {{ (1, 2)[0] }}
{{ dict(a=1).items()|list }}
{{ 'one\\ntwo'|indent(4, first=true) }} {{ [3, 1, 2]|sort }} {{ range(3)|sum }} {{ 'x' in 'xyz' and 3 > 2 >= 1 }}""",
    "parts": """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content if part.type == 'text' %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}""",
    "recursive loop": """{% for x in [[1, [2]], [3]] recursive %}
({% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}){% endfor %}""",
    "call and filter blocks": """{% macro m() %}<{{ caller() }}>{% endmacro %}
{% call m() %}x{% endcall %}{% filter upper %}y{% endfilter %}""",
    "set block": "{% set t %}{{ bos_token }}a{% endset %}{{ t }}{{ t|length }}{{ eos_token }}{{ unknown_variable }}",
    "tuples": "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %}{% set c, d = 5, 6 %}{{ c ~ d }}",
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def ours(template: str, chat: Any = CHAT, *, prompt: bool = True, final: bool = False, **variables: Any) -> str:
    variables = {"tools": None, "documents": None, **VARIABLES, **variables}
    return render(template, chat, add_generation_prompt=prompt, continue_final_message=final, variables=variables)


def transformers_renders(template: str, chat: Any, **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"tools": TOOLS, "add_generation_prompt": True, **VARIABLES, **options}
    rendered, _ = render_jinja_template(conversations=[chat], chat_template=template, **options)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name: str) -> None:
    expected = transformers_renders(TEMPLATES[name], CHAT)
    assert ours(TEMPLATES[name], tools=TOOLS) == expected
    assert expected


def test_the_real_template(smollm2_path: str) -> None:
    from octavo.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2_path)
    assert tokenizer.chat_template is not None
    chats = [[{"role": "user", "content": "What is 2 + 2?"}], [m for m in CHAT if isinstance(m["content"], str)]]
    for chat in chats:
        for prompt in (True, False):
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=prompt)
            assert text == transformers_renders(tokenizer.chat_template, chat, add_generation_prompt=prompt)
    text = tokenizer.apply_chat_template(chats[0])
    assert text.endswith("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text)[0] == tokenizer.encode("<|im_start|>")[0]


@pytest.mark.parametrize(
    "content", ["Sure, here", "ends with a space ", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)
def test_continue_the_final_message(content: Any) -> None:
    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    expected = transformers_renders(TEMPLATES["parts"], chat, add_generation_prompt=False, continue_final_message=True)
    assert ours(TEMPLATES["parts"], chat, prompt=False, final=True) == expected
    assert chat[-1]["content"] == content


def test_a_message_that_holds_the_marker_itself() -> None:
    first = ours(
        "{{ messages[0].content }}!",
        [{"role": "user", "content": "x<octavo-continue-here>y"}],
        prompt=False,
        final=True,
    )
    assert first == "x<octavo-continue-here>y"


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        ("{{ messages[0].content }}", []),
        ("{{ messages[0].content }}", [{"role": "user", "content": None}]),
        ("{{ messages[0].content }}", [{"role": "user", "content": [{"type": "image"}]}]),
        ("{{ messages[0].content[:2] }}", [{"role": "user", "content": "text"}]),
    ],
)
def test_what_cannot_be_continued(template: str, chat: Any) -> None:
    with pytest.raises(ValidationError, match="last message"):
        ours(template, chat, prompt=False, final=True)
    with pytest.raises(ValidationError, match="exclude"):
        ours(template, chat, prompt=True, final=True)


def test_the_sandbox_shows_nothing_of_python() -> None:
    assert ours("{{ raise_exception.__globals__ }}{{ ''.__class__ }}{{ '{0.__class__}'.format(1) }}") == ""


@pytest.mark.parametrize(
    "code",
    [
        "range",
        "namespace",
        "dict",
        "raise_exception",
        "messages.append",
        "''.join",
        "m",
        "messages|map('upper')",
        "messages|reverse",
        "messages|select",
    ],
)
@pytest.mark.parametrize(
    "way", ["{{ C }}", "{{ [C] }}", "{{ C ~ 'a' }}", "{{ '%s' % C }}", "{{ C|string }}", "{{ {'a': C}|upper }}"]
)
def test_no_address_of_this_process_is_printed(code: str, way: str) -> None:
    try:
        text = ours("{% macro m() %}{% endmacro %}" + way.replace("C", code))
    except ValidationError as error:
        text = str(error)
    assert re.search(r"0x[0-9a-f]{6}|<class|<built-in", text) is None


def test_generators_may_be_walked() -> None:
    roles = "messages|map(attribute='role')"
    assert ours("{{ 'user' in ROLES }} {{ ROLES|unique|join }} {{ ROLES|sort|first }}".replace("ROLES", roles)) != ""


def test_a_very_long_chat_is_within_the_bounds() -> None:
    """A million characters in 500 messages, through each way of putting text together."""
    chat = [{"role": "user", "content": "word " * 400} for _ in range(500)]
    ways = ["'<' + m.content + '>'", "'<' ~ m.content ~ '>'", "'<%s>' % m.content", "'<{}>'.format(m.content)"]
    ways += ["'<' + m.content|replace('\n', ' ') + '>'", "['<', m.content, '>']|join", "'<' + m.content.strip() + ' >'"]
    for way in ways:
        text = ours("{% for m in messages %}{{ " + way + " }}{% endfor %}", chat)
        assert text == "".join(f"<{message['content']}>" for message in chat)


def test_strftime_now() -> None:
    assert ours("{{ strftime_now('%Y')|int > 2000 }}") == "True"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ nope.x }}", "'nope' is undefined"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__mul__(9) }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{{ raise_exception.__globals__['time'] }}", "unsafe"),
        ("{{ lipsum() }}", "undefined"),
        (" " * (MAX_TEMPLATE_CHARS + 1), "characters"),
    ],
)
def test_failures(template: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        ours(template)
    assert caught.value.parameter == "messages"


DOUBLING = "{% set ns = namespace(x=[1], y=[1], s='ab', t=(1,)) %}{% for i in range(90) %}"
NESTED = DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
BOMBS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "{% set _tick = 1 %}{% set tick = 1 %}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{{ range(10 ** 9)|list }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ (10 ** (10 ** 8)) % 7 }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ 'x'.translate({120: 'y' * 9999999}) }}",
    "{{ 'x'.encode() * 10 ** 10 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10 ** 9) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ strftime_now('%Y' * 99999) }}",
    "{{ 'a\n'|indent(10 ** 10) }}",
    "{{ messages|tojson(indent=10 ** 9) }}",
    "{{ range(9999)|join('x' * 99999) }}",
    "{{ ('x' * 9999).join(range(9999)|map('string')|list) }}",
    "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ['a' * 99999]|map('replace', 'a', 'b' * 99999)|list }}",
    "{{ [[1] * 999] * 999|sum(start=[]) }}",
    "{{ ('a' * 9999999)|list|sort }}",
    "{% set x = 'a' * 99999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "{% set x %}{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    "{% set l = namespace(x=[]) %}{% for i in range(9999) %}{% set l.x = l.x + ['a' * 9999999] %}{% endfor %}",
    "{% set l = namespace(x=[]) %}{% for i in range(9999) %}{% set l.x = l.x + [range(9999)|list] %}{% endfor %}",
    *(
        "{% set x = 'ab ' * 5000000 %}{% set l = namespace(x=[]) %}{% for i in range(9999) %}{% set l.x = l.x + ["
        + copy
        + "] %}{% endfor %}"
        for copy in ("x[1:]", "x.upper()", "x.strip()", "x|upper", "x|trim", "x|reverse", "x.partition('b')")
    ),
    "{% set x = ('ab,' * 5000000).split(',') %}",
    "{% set x = ('ab ' * 5000000).split() %}",
    "{% set x = ('ab\n' * 5000000).splitlines() %}",
    "{% set x = [1] * 9000000 %}",
    "{% set x = [1] * 1000000 %}{% set l = namespace(x=[]) %}{% for i in range(9999) %}{% set l.x = l.x + [x[1:]] %}"
    "{% endfor %}",
    DOUBLING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    DOUBLING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    DOUBLING + "{% set ns.s = ns.s|replace('a', 'aaa') %}{% endfor %}",
    DOUBLING + "{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {ns.t: 1}|length }}",
    NESTED + "{{ ns.x }}",
    NESTED + "{{ ns.x|tojson }}",
    NESTED + "{{ ns.x|string|length }}",
    NESTED + "{{ (ns.x ~ '')|length }}",
    NESTED + "{{ '%s' % (ns.x,) }}",
    NESTED + "{{ '{}'.format(ns.x) }}",
    NESTED + "{{ ns.x|upper }}",
    NESTED + "{{ ns.x == ns.y }}",
    NESTED + "{{ ns.x is eq(ns.y) }}",
    NESTED + "{{ ns.x in [ns.y] }}",
    NESTED + "{{ [ns.x].index(ns.y) }}",
    NESTED + "{{ [ns.x, ns.y]|unique|list }}",
    NESTED + "{{ [[ns.x]]|selectattr('0', 'eq', ns.y)|list }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_bombs(template: str) -> None:
    """Endless or exploding templates end in an error after little CPU time, and before the memory is used."""
    import tracemalloc

    if template.startswith(("{{", "{% set x", "{% set l")):
        tracemalloc.start()
    try:
        with pytest.raises(ValidationError, match="chat template"):
            ours(template)
        peak = tracemalloc.get_traced_memory()[1] if tracemalloc.is_tracing() else 0
    finally:
        tracemalloc.stop()
    assert peak < 40 * MAX_OUTPUT_CHARS


def test_many_threads_have_a_budget_each() -> None:
    """A template that runs out of time does not disturb others that run beside it."""
    good = TEMPLATES["namespace and macro"]
    expected = ours(good)

    def one(i: int) -> bool:
        if i % 8:
            return ours(good) == expected
        with pytest.raises(ValidationError):
            ours(BOMBS[0])
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(24)))


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "context", "environment", "template", "loop", "range"])
def test_a_variable_may_have_any_name(name: str) -> None:
    text = render(
        "{{ messages[0].role }}v" if name in {"self", "loop"} else "{{ messages[0].role }}{{ " + name + " }}",
        [{"role": "user", "content": ""}],
        add_generation_prompt=False,
        continue_final_message=False,
        variables={name: "v"},
    )
    assert text == "userv"
