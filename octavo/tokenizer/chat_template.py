"""Chat templates, rendered in a sandbox with bounds on size, time and memory.

A template is code from a model's author, or from a client where the server allows that. It runs in the environment that
transformers gives it (its extensions, filters and globals), with three additions:

- every pass of a loop and every call ticks a clock of CPU time, so that an endless template ends in an error;
- operations that can grow a value faster than a loop, or walk one that shares its parts a billion times (``*``, ``~``,
  replacing, joining, printing, comparing), are measured before they run, and what they make is paid from a budget;
- filters, methods and globals that serve web pages or only such growth are absent.

Every failure is a ValidationError with ``parameter="messages"``.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.exceptions import ValidationError

MAX_TEMPLATE_CHARS = 512 * 1024
MAX_OUTPUT_CHARS = 16 * 1024 * 1024  # also the largest value a template may build
MAX_BUILT_CHARS = 16 * MAX_OUTPUT_CHARS  # all values built in one rendering
MAX_RANGE = 10_000
MAX_INT_BITS = 4096
CPU_SECONDS = 0.5
POINTER, OBJECT = 8, 64  # bytes: of an item of a list, and of one that is made for it

# Absent from the sandbox: random output, HTML, and padding that no chat needs.
REMOVED_FILTERS = ("batch", "center", "filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
REMOVED_GLOBALS = ("cycler", "joiner", "lipsum")
REMOVED_METHODS = frozenset({"encode", "expandtabs", "maketrans", "translate"})  # of str
PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
SPLITTING_METHODS = frozenset({"split", "rsplit", "splitlines"})
COPYING_METHODS = frozenset(
    {"capitalize", "casefold", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rpartition", "rstrip"}
    | {"strip", "swapcase", "title", "upper"}
)
BOUND_METHODS = (
    PADDING_METHODS
    | REMOVED_METHODS
    | SPLITTING_METHODS
    | COPYING_METHODS
    | {"replace", "join", "format", "format_map"}
)
SPACES = [c for c in map(chr, range(0x3001)) if c.isspace()]  # where split() and splitlines() may cut
COMPARISONS = ("eq", "==", "equalto", "ne", "!=", "in", "lt", "<", "lessthan", "le", "<=", "gt", ">", "ge", ">=")
TEXT_FILTERS = (
    "string",
    "upper",
    "lower",
    "title",
    "capitalize",
    "trim",
    "escape",
    "e",
    "forceescape",
    "safe",
    "urlencode",
    "truncate",
    "striptags",
    "wordcount",
)
WALKING_FILTERS = ("sort", "unique", "min", "max", "groupby", "dictsort", "int", "float", "reverse")
# A field width of 5 digits or more, or one taken from a value. Each alternative is linear in the pattern's length.
WIDE_FIELD = re.compile(r"\d{5}|%[-+ #0]{0,8}\d{0,8}\.?\*|\{[^{}:]*:[^{}]*\{")


NAMELESS = (type, FunctionType, BuiltinFunctionType, MethodType, GeneratorType)  # as text they are addresses


class _Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + CPU_SECONDS
        self.built = 0


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """The chat as text. ``continue_final_message`` ends it within the last message, for the model to go on.

    Raises ValidationError if the template does not compile, fails, refuses the messages or passes a bound.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise _fault(f"the template has {len(template)} characters, at most {MAX_TEMPLATE_CHARS} are allowed")
    if continue_final_message and add_generation_prompt:
        raise _fault("continue_final_message and add_generation_prompt exclude each other")
    chat = [dict(message) for message in messages]
    marker = _mark_final(chat) if continue_final_message else None
    token = _budget.set(_Budget())
    try:
        compiled = _compile(template)
        context = {**variables, "messages": chat, "add_generation_prompt": add_generation_prompt}
        text = _collect(compiled.generate(context))  # a dict: a variable may be called like a parameter
    except ValidationError:
        raise
    except Exception as error:  # whatever the template's expressions raise, MemoryError and RecursionError too
        raise _fault(f"{type(error).__name__}: {error}") from error
    finally:
        _budget.reset(token)
    return text if marker is None else _cut_at(text, marker)


def _fault(reason: str) -> ValidationError:
    return ValidationError(f"chat template: {reason}", parameter="messages")


def _tick() -> None:
    """Called by every loop pass and call of a template. CPU time, so that a busy machine fails no honest template."""
    if time.thread_time() > _budget.get().deadline:
        raise _fault(f"more than {CPU_SECONDS} s of computation")


def _collect(pieces: Iterable[str]) -> str:
    out: list[str] = []
    size = 0
    for piece in pieces:
        _tick()
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise _fault(f"more than {MAX_OUTPUT_CHARS} characters of output")
        out.append(piece)
    return "".join(out)


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Append a marker to the last message's text; returns the marker."""
    content = chat[-1].get("content") if chat else None
    marker = "<octavo-continue-here>"
    if isinstance(content, str):
        while marker in content:
            marker += ">"
        chat[-1]["content"] = content + marker
        return marker
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        chat[-1]["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + marker}]
        return marker
    raise _fault("continue_final_message needs a last message with text")


def _cut_at(text: str, marker: str) -> str:
    before, found, _ = text.rpartition(marker)
    if not found:
        raise _fault("it drops the end of the last message, so that message cannot be continued")
    return before


# ---- bounds on values


def _measure(value: Any, *, shown: bool = False) -> int:
    """About how many characters ``str(value)`` has; gives up past the bound, so on lists that share their parts too.

    ``shown``: it is about to become text, which must not tell addresses of this process.
    """
    size = seen = 0
    stack = [value]
    while stack:
        item = stack.pop()
        seen += 1
        if seen % 4096 == 0:
            _tick()
        if shown and (isinstance(item, NAMELESS) or type(item).__repr__ is object.__repr__):
            raise _fault(f"it prints what has no text of its own, a {type(item).__name__}")
        size += len(item) if isinstance(item, str) else item.bit_length() // 3 + 8 if isinstance(item, int) else 8
        if isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        if size + len(stack) > MAX_OUTPUT_CHARS:
            raise _fault(f"it builds a value of more than {MAX_OUTPUT_CHARS} characters")
    return size


def _bounded(size: int) -> None:
    """Pay for a value of ``size`` characters before it is built."""
    if size > MAX_OUTPUT_CHARS:
        raise _fault(f"it builds a value of more than {MAX_OUTPUT_CHARS} characters")
    budget = _budget.get()
    budget.built += size
    if budget.built > MAX_BUILT_CHARS:
        raise _fault(f"it builds values of more than {MAX_BUILT_CHARS} characters in all")


def _copied(value: Any) -> Any:
    """Pay for a copy of ``value``, as large as a text's characters or a list's pointers."""
    if isinstance(value, str | list | tuple):
        _bounded(len(value) * (1 if isinstance(value, str) else POINTER))
    return value


def _printable(value: Any) -> Any:
    """What an expression is about to print, or a filter to turn into text."""
    if not isinstance(value, str):
        _measure(value, shown=True)
    return value


def _walkable(value: Any) -> Any:
    """What is about to be compared."""
    if not isinstance(value, str):
        _measure(value)
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for sized, count in ((left, right), (right, left)):
            if isinstance(sized, str | bytes | list | tuple) and isinstance(count, int):
                _bounded(len(sized) * max(count, 0) * (POINTER if isinstance(sized, list | tuple) else 1))
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise _fault(f"a number of more than {MAX_INT_BITS} bits")
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
            raise _fault(f"a number of more than {MAX_INT_BITS} bits")
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _copied(left)
        _copied(right)


def _check_format(pattern: str, values: Any) -> None:
    if WIDE_FIELD.search(pattern):
        raise _fault("a format with a wide or computed field")
    _bounded(len(pattern) + (pattern.count("%") + pattern.count("{")) * _measure(values, shown=True))


def _check_method(obj: str, name: str, args: tuple[Any, ...]) -> None:
    """Methods of str that build something, above all what can be far larger than their operands."""
    if name in PADDING_METHODS:
        _bounded(max((width for width in args if isinstance(width, int)), default=0))
    elif name == "replace" and len(args) >= 2:
        _bounded(len(obj) + obj.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args:
        _bounded(_measure(args[0], shown=True) + len(obj) * len(args[0]))
    elif name in ("format", "format_map"):
        _check_format(obj, args)
    elif name in SPLITTING_METHODS:
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        cuts = sum(map(obj.count, SPACES)) if separator is None else obj.count(separator)
        most = next((count for count in args[:2] if type(count) is int and count >= 0), cuts)
        _bounded(len(obj) + OBJECT * min(cuts, most))
    elif name in COPYING_METHODS:
        _copied(obj)


# ---- the environment


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment with the clock and the bounds."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (names as in jinja2)
        _tick()
        if isinstance(getattr(__obj, "__self__", None), list | tuple | Mapping):  # index, count and get compare
            _measure(args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2's hook on every attribute a template reads: methods of str get their bound here."""
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(owner, str) or name not in BOUND_METHODS:
            return super().wrap_str_format(value)
        if name in REMOVED_METHODS:
            raise _fault(f"the method {name!r} is not available")
        method = super().wrap_str_format(value) or value

        @functools.wraps(value)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            _tick()
            if name == "join":
                args = tuple(map(list, args))  # a generator could not be measured
            _check_method(owner, name, (*args, *kwargs.values()))
            return method(*args, **kwargs)

        return bounded

    def tick(self) -> str:
        """Compiled into the head of each loop and macro body."""
        _tick()
        return ""

    def concat_bounded(self, *parts: Any) -> str:
        """What ``~`` compiles to."""
        _bounded(sum(len(p) if isinstance(p, str) else _measure(p, shown=True) for p in parts))
        return "".join(map(str, parts))

    def copied(self, value: Any) -> Any:
        """What slices compile to."""
        return _copied(value)

    def measured(self, value: Any) -> Any:
        """What tuples and the sides of a comparison compile to."""
        return _walkable(value)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for node in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(_call("tick", node), lineno=node.lineno))  # type: ignore[attr-defined]
        for compare in source.find_all(nodes.Compare):
            compare.expr = _call("measured", compare, compare.expr)
            for operand in compare.ops:
                operand.expr = _call("measured", compare, operand.expr)
        source = _MeasureBuilt().visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)


def _concat_pieces(pieces: Iterable[str]) -> str:
    """Of a macro's body, a ``{% set %}`` block, ..."""
    parts = list(pieces)
    _bounded(sum(map(len, parts)))
    return "".join(parts)


def _call(method: str, at: nodes.Node, *args: nodes.Expr) -> nodes.Call:
    """A call of a method of the environment, which no assignment in the template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None, lineno=at.lineno)


class _MeasureBuilt(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (jinja2's naming)
        self.generic_visit(node)
        return _call("concat_bounded", node, *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("copied", node, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """Tuples may be keys, and hashing one walks all of it."""
        self.generic_visit(node)
        return _call("measured", node, node) if node.ctx == "load" else node


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (an attribute of jinja2's class)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: Any) -> None:
    raise _fault(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256:
        raise _fault("a date format of more than 256 characters")
    _check_format(pattern, ())
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without jinja2's HTML escapes, as transformers has it."""
    size = _measure(value)
    _bounded(size * (1 + (indent if isinstance(indent, int) else len(indent or ""))))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*args: int) -> range:
    result = range(*args)
    if len(result) > MAX_RANGE:
        raise _fault(f"a range of more than {MAX_RANGE} numbers")
    _bounded(OBJECT * len(result))
    return result


def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_method(str(_printable(s)), "replace", (str(_printable(old)), str(_printable(new))))


def _check_indent(s: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(_printable(s))
    _bounded(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    """jinja2's filter without its HTML side; a generator is read first, so that it can be measured."""
    items = list(value)
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    separator = str(_printable(d))
    _bounded(_measure(items, shown=True) + len(separator) * len(items))
    return separator.join(map(str, items))


def _check_list(value: Any) -> None:
    if isinstance(value, str | list | tuple | Mapping):
        _bounded(OBJECT * len(value))


def _check_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    """Sums of lists copy their beginning again and again."""
    if not isinstance(start, int | float):
        raise _fault("a sum of what are not numbers")


def _check_sides(*sides: Any) -> None:
    for side in sides:
        _walkable(side)


def _guarded(inner: Any, check: Callable[..., Any]) -> Callable[..., Any]:
    """``inner``, a filter or test, after ``check`` on the template's own arguments."""

    @functools.wraps(inner)  # keeps jinja2's mark of a context argument before the value
    def call(*args: Any, **kwargs: Any) -> Any:
        _tick()
        own = (a for a in args if not isinstance(a, jinja2.Environment | nodes.EvalContext | Context))
        check(*own, **kwargs)
        return inner(*args, **kwargs)

    return call


def _bound_filters(filters: dict[str, Callable[..., Any]]) -> None:
    """A bound before each filter that can grow its operands or walk them deeply; those no chat needs go."""
    for name in REMOVED_FILTERS:
        filters.pop(name, None)
    checks: dict[str, Callable[..., Any]] = {
        "replace": _check_replace,
        "indent": _check_indent,
        "list": _check_list,
        "sum": _check_sum,
        "format": lambda pattern, *args, **kwargs: _check_format(str(pattern), (*args, *kwargs.values())),
        **dict.fromkeys(TEXT_FILTERS, lambda value, *_, **__: _copied(_printable(value))),
        **dict.fromkeys(WALKING_FILTERS, lambda value, *_, **__: _copied(_walkable(value))),
    }
    for name, check in checks.items():
        filters[name] = _guarded(filters[name], check)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_printable
    )
    _bound_filters(environment.filters)
    for name in REMOVED_GLOBALS:
        environment.globals.pop(name, None)
    for name in COMPARISONS:
        environment.tests[name] = _guarded(environment.tests[name], _check_sides)
    environment.concat = _concat_pieces  # type: ignore[method-assign]
    environment.globals["range"] = _range
    environment.filters["tojson"] = _tojson
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)
