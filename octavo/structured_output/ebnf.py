"""EBNF as llama.cpp (GBNF) and xgrammar write it, turned into Lark for llguidance.

Such grammars describe characters, while llguidance cuts text into terminals, each as long as it can be: ``"a"* "ab"``
would never match. So a grammar without recursion becomes one terminal, a regular expression, where length does not
matter; in any other, each character is a terminal of its own. Knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_NESTING = 100
_RULE = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)|(?P<define>::=)|(?P<name>[A-Za-z_][\w-]*)|(?P<string>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<class>\[\^?(?:[^\]\\]|\\.)*\])|(?P<repeat>\{\s*\d+\s*(?:,\s*\d*\s*)?\}|[*+?])|(?P<mark>[()|.])""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}


class EbnfError(ValueError):
    """What is wrong, and in which line."""


def is_ebnf(text: str) -> bool:
    """Rules are written with ``::=``, which Lark does not know."""
    return _RULE.search(text) is not None


@dataclass(frozen=True, slots=True)
class GrammarNode:
    """Of the syntax tree: a ``kind`` (chars, any, text, rule, sequence, choice, repeat), its text and its children."""

    kind: str
    text: str = ""
    children: tuple[GrammarNode, ...] = ()

    def walk(self) -> Iterator[GrammarNode]:
        yield self
        for child in self.children:
            yield from child.walk()


def _unescaped(body: str) -> Iterator[tuple[str, bool]]:
    """(character, whether it was escaped) of a string or class."""
    for match in _ESCAPE.finditer(body):
        code = match[1] or match[2] or match[3]
        if code is not None:
            if int(code, 16) > 0x10FFFF:
                raise EbnfError(f"\\U{code} is not a character")
            yield chr(int(code, 16)), True
        elif match[4] is not None:
            yield _CONTROL.get(match[4], match[4]), True
        else:
            yield match[5], False


def _regex_char(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _class(body: str) -> str:
    """A class of characters as Rust's regular expressions write it."""
    negated = body.startswith("^")
    items = list(_unescaped(body[negated:]))
    out, i = [], 0
    while i < len(items):
        low = items[i][0]
        if i + 2 < len(items) and items[i + 1] == ("-", False):
            high = items[i + 2][0]
            if high < low:
                raise EbnfError(f"the range {low!r}-{high!r} is empty")
            out.append(f"{_regex_char(low)}-{_regex_char(high)}")
            i += 3
        else:
            out.append(_regex_char(low))
            i += 1
    if not out:
        raise EbnfError("a class of characters is empty")
    return f"[{'^' if negated else ''}{''.join(out)}]"


class _Parser:
    """Recursive descent over a list of (kind, text, line)."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        self._at, place, line, self._depth = 0, 0, 1, 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None or match.lastgroup is None:
                raise EbnfError(f"line {line}: cannot read {text[place : place + 20]!r}")
            if match.lastgroup != "space":
                self._tokens.append((match.lastgroup, match[0], line))
            line += match[0].count("\n")
            place = match.end()
        self._tokens.append(("end", "", line))

    def _peek(self, ahead: int = 0) -> tuple[str, str, int]:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _take(self, kind: str, what: str) -> str:
        got, text, line = self._peek()
        if got != kind:
            raise EbnfError(f"line {line}: expected {what}, got {text or 'the end'!r}")
        self._at += 1
        return text

    def rules(self) -> dict[str, GrammarNode]:
        rules: dict[str, GrammarNode] = {}
        while self._peek()[0] != "end":
            line = self._peek()[2]
            name = self._take("name", "the name of a rule")
            self._take("define", "'::='")
            if name in rules:
                raise EbnfError(f"line {line}: rule {name!r} is defined twice")
            rules[name] = self._choice()
        return rules

    def _choice(self) -> GrammarNode:
        options = [self._sequence()]
        while self._peek()[:2] == ("mark", "|"):
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else GrammarNode("choice", children=tuple(options))

    def _sequence(self) -> GrammarNode:
        parts = []
        while (atom := self._atom()) is not None:
            while self._peek()[0] == "repeat":
                atom = GrammarNode("repeat", self._take("repeat", "a repetition").replace(" ", ""), (atom,))
            parts.append(atom)
        return parts[0] if len(parts) == 1 else GrammarNode("sequence", children=tuple(parts))

    def _atom(self) -> GrammarNode | None:
        kind, text, line = self._peek()
        if kind == "name" and self._peek(1)[0] == "define":
            return None  # the next rule
        if kind in ("name", "string", "class") or (kind, text) == ("mark", "."):
            self._at += 1
            try:
                return self._leaf(kind, text)
            except EbnfError as error:
                raise EbnfError(f"line {line}: {error}") from None
        if (kind, text) != ("mark", "("):
            return None
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise EbnfError(f"line {line}: more than {MAX_NESTING} parentheses inside one another")
        self._at += 1
        inner = self._choice()
        if self._peek()[:2] != ("mark", ")"):
            raise EbnfError(f"line {self._peek()[2]}: expected ')', got {self._peek()[1] or 'the end'!r}")
        self._at += 1
        self._depth -= 1
        return GrammarNode("group", children=(inner,))

    def _leaf(self, kind: str, text: str) -> GrammarNode:
        if kind == "name":
            return GrammarNode("rule", text)
        if kind == "string":
            return GrammarNode("text", "".join(char for char, _ in _unescaped(text[1:-1])))
        return GrammarNode("chars", _class(text[1:-1])) if kind == "class" else GrammarNode("any")


def _is_recursive(rules: dict[str, GrammarNode]) -> bool:
    """Whether a rule contains itself. Iterative, for chains of rules may be long."""
    uses = {name: [node.text for node in body.walk() if node.kind == "rule"] for name, body in rules.items()}
    open_, done = set(), set()
    for root in rules:
        stack = [(root, iter(uses[root]))]
        open_.add(root)
        while stack:
            name, rest = stack[-1]
            used = next((u for u in rest if u not in done), None)
            if used is None:
                stack.pop()
                open_.discard(name)
                done.add(name)
            elif used in open_:
                return True
            else:
                open_.add(used)
                stack.append((used, iter(uses[used])))
    return False


class _Printer:
    """The tree as Lark, with every character a terminal or, in ``whole``, everything one terminal."""

    def __init__(self, names: dict[str, str], whole: bool) -> None:
        self._names, self._whole = names, whole

    def show(self, node: GrammarNode) -> str:
        inner = [self.show(child) for child in node.children]
        if node.kind == "rule":
            return self._names[node.text]
        if node.kind == "text":
            pieces = [_regex_char(char) for char in node.text]
            if not pieces:
                return '""'
            return f"/{''.join(pieces)}/" if self._whole else " ".join(f"/{piece}/" for piece in pieces)
        if node.kind in ("chars", "any"):
            return f"/{node.text or '(?s:.)'}/"
        if node.kind == "sequence":
            return " ".join(inner) or '""'
        if node.kind == "choice":
            return " | ".join(inner)
        return f"({inner[0]}){node.text}"  # group, repeat


def ebnf_to_lark(text: str) -> str:
    """A Lark grammar of the same language; ``root`` is where it starts. Raises EbnfError."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise EbnfError("there is no rule 'root'")
    for name, body in rules.items():
        missing = next((node.text for node in body.walk() if node.kind == "rule" and node.text not in rules), None)
        if missing is not None:
            raise EbnfError(f"rule {name!r} uses {missing!r}, which is not defined")
    whole = not _is_recursive(rules)
    names = {name: f"{'R' if whole else 'r'}{i}" for i, name in enumerate(rules)}
    printer = _Printer(names, whole)
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {printer.show(body)}" for name, body in rules.items()]
    return "\n".join(lines) + "\n"
