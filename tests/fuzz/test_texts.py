"""Hostile templates and whatever a model may write: bounded, and every failure is one that is raised on purpose."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.exceptions import ValidationError
from octavo.tokenizer.chat_template import MAX_OUTPUT_CHARS, render
from tests.fuzz.mutation import corpus, damaged, quick
from tests.parsers.parsing import PARSERS, pieces, run

TEMPLATES = corpus("templates")
TEXTS = corpus("texts")
CHAT = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
VALUES = (
    *(
        "messages",
        "tools",
        "ns",
        "ns.x",
        "ns.y",
        "'ab'",
        "7",
        "10 ** 9",
        "-1",
        "1e9",
        "none",
        "[1, 'a']",
        "{'a': ns.x}",
    ),
    *("messages[0]", "messages[0].content", "range(9)", "loop", "namespace", "range", "''.__class__", "self", "caller"),
    *("raise_exception", "cycler", "dict(a=1)", "m(2)", "''.format", "messages.append", "(ns.x, ns.x)"),
)
FILTERS = (
    *(
        "list",
        "join('ab')",
        "tojson",
        "tojson(indent=9)",
        "replace('a', 'aaaa')",
        "string",
        "length",
        "reverse",
        "sort",
    ),
    *(
        "unique",
        "map('upper')",
        "map('list')",
        "map(attribute='role')",
        "select",
        "batch(2)",
        "indent(99)",
        "center(999)",
    ),
    *(
        "format(1, 2)",
        "sum",
        "sum(start=[])",
        "first",
        "last",
        "min",
        "groupby('role')",
        "items",
        "dictsort",
        "int",
        "e",
    ),
    *(
        "truncate(3)",
        "wordcount",
        "xmlattr",
        "attr('__class__')",
        "default(ns)",
        "round",
        "abs",
        "tojson|tojson",
        "upper",
    ),
)
OPERATORS = ("+", "~", "*", "**", "%", "//", "==", "in", "and", "<", "is eq", "-")
METHODS = (
    "join(ns.y)",
    "replace('a', 'b' * 99)",
    "split('a')",
    "ljust(99999)",
    "format(ns.x)",
    "items()",
    "count('a')",
)


def expression(chance: random.Random, depth: int = 3) -> str:
    """Some expression, mostly valid."""
    if depth == 0 or chance.random() < 0.2:
        return chance.choice(VALUES)
    inner = expression(chance, depth - 1)
    match chance.randrange(6):
        case 0 | 1:
            return f"({inner})|{chance.choice(FILTERS)}"
        case 2 | 3:
            return f"({inner} {chance.choice(OPERATORS)} {expression(chance, depth - 1)})"
        case 4:
            return f"({inner}).{chance.choice(METHODS)}"
        case _:
            return f"[{inner}, {expression(chance, depth - 1)}]"


def statements(chance: random.Random, depth: int = 3) -> str:
    """Some template text; loops nest, and values grow in them."""
    value = expression(chance)
    if depth == 0:
        return "{{ " + value + " }}"
    inner = "".join(statements(chance, depth - 1) for _ in range(chance.randrange(1, 3)))
    return chance.choice(
        (
            "{% for i in range(90) %}" + inner + "{% endfor %}",
            "{% for x in " + value + " recursive %}" + inner + "{% endfor %}",
            "{% if " + value + " %}" + inner + "{% endif %}",
            "{% set ns.x = " + value + " %}" + inner,
            "{% set ns.y = [ns.y, ns.x] %}" + inner,
            "{% macro m(n) %}" + inner + "{{ m(n) if n }}{% endmacro %}{{ m(" + value + ") }}",
            "{% set b %}" + inner + "{% endset %}{% set ns.x = b %}",
            "{% filter " + chance.choice(FILTERS) + " %}" + inner + "{% endfilter %}",
            "{{ " + value + " }}" + inner,
        )
    )


def template_of(seed: int) -> str:
    return "{% set ns = namespace(x='ab', y=[1]) %}" + statements(random.Random(seed))


def bounded(template: str) -> None:
    """Rendered, or refused as a fault of the request, in bounded memory."""
    tracemalloc.start()
    variables: dict[str, Any] = {"tools": TOOLS, "bos_token": "<s>"}
    text = parameter = ""
    try:
        text = render(template, CHAT, add_generation_prompt=True, continue_final_message=False, variables=variables)
    except ValidationError as error:
        parameter = error.parameter or "none"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert parameter in ("", "messages")
    assert len(text) <= MAX_OUTPUT_CHARS
    assert "<class" not in text
    assert peak < 40 * MAX_OUTPUT_CHARS
    assert CHAT[0] == {"role": "user", "content": "hello world"}


@quick
@given(seed=st.integers(0, 2**32 - 1))
def test_made_up_templates(seed: int) -> None:
    bounded(template_of(seed))


@quick
@given(content=damaged(TEMPLATES))
def test_damaged_templates(content: bytes) -> None:
    bounded(content.decode("utf-8", "replace"))


@pytest.mark.parametrize("name", PARSERS)
@quick
@given(content=damaged(TEXTS), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_parsers(name: str, content: bytes, cuts: list[int]) -> None:
    text = content.decode("utf-8", "replace")
    assert run(PARSERS[name](), pieces(text, cuts)) == run(PARSERS[name](), [text])
