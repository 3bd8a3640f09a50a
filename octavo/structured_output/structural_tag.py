"""Structural tags: free text and constrained pieces between fixed marks, as vLLM and xgrammar describe them.

Two forms are read: ``{"type": "structural_tag", "format": {...}}`` with nested formats, and the older ``{"structures":
[{"begin", "schema", "end"}], "triggers": [...]}``. :func:`tool_calls` writes the first kind. Knows nothing of tokens
but the names of special ones, which marks may contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.messages import StructuredOutputsParams

MAX_NESTING = 50


class TagError(ValueError):
    """What is wrong with a structural tag, and where."""


@dataclass(frozen=True, slots=True)
class Tag:
    """JSON of ``schema`` between two fixed texts; special tokens of the model may be written out in them."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str = ""

    def format(self) -> dict[str, Any]:
        content = {"type": "json_schema", "json_schema": self.schema}
        return {"type": "tag", "begin": self.begin, "content": content, "end": self.end}


def tool_calls(
    tags: Sequence[Tag],
    *,
    required: bool,
    parallel: bool = True,
    separator: str = "",
    triggers: Sequence[str] = (),
    prefix: str = "",
    suffix: str = "",
) -> StructuredOutputsParams:
    """The constraint of a chat answer with tools, one tag a function.

    ``required``: nothing but calls, at least one, ``separator`` between them; otherwise free text in which each of
    ``triggers`` (by default the tags' beginnings) begins a call. Without ``parallel`` the first call ends the answer.
    ``prefix`` and ``suffix`` surround required calls: ``"["`` and ``"]"`` where they are written as a list.
    """
    formats = [tag.format() for tag in tags]
    if required:
        calls: dict[str, Any] = {"type": "tags_with_separator", "tags": formats, "separator": separator}
        calls |= {"at_least_one": True, "stop_after_first": not parallel}
        marks = [{"type": "const_string", "value": text} for text in (prefix, suffix)]
        calls = {"type": "sequence", "elements": [marks[0], calls, marks[1]]} if prefix or suffix else calls
    else:
        begins = list(triggers) or list(dict.fromkeys(tag.begin for tag in tags))
        calls = {"type": "triggered_tags", "triggers": begins, "tags": formats, "stop_after_first": not parallel}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": calls})


def quote(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7F") if text else '""'


def regex_literal(regex: str) -> str:
    """A regular expression between Lark's slashes."""
    escaped = re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), regex, flags=re.DOTALL)
    return f"/{escaped or '(?:)'}/"  # two slashes are a comment


class TagWriter:
    """Writes Lark rules, bottom up. ``special`` maps the text of the model's special tokens to their ids.

    ``schema`` writes a JSON schema as a symbol of Lark, ``grammar`` a whole grammar as one.
    """

    def __init__(self, special: Mapping[str, int], schema: Callable[[Any], str], grammar: Callable[[str], str]) -> None:
        self._special, self._schema, self._grammar = special, schema, grammar
        names = sorted((name for name in special if name), key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._rules: list[str] = []
        self._depth = 0

    def grammar(self, tag: Mapping[str, Any]) -> str:
        """The whole grammar of a structural tag, beginning at ``start``. Raises TagError."""
        if "structures" in tag or "triggers" in tag:
            form = _triggered(tag)
        elif isinstance(tag.get("format"), Mapping):
            form = tag["format"]
        else:
            raise TagError("needs 'format', or 'structures' and 'triggers'")
        start = self.write(form, "format")
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"t{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def write(self, form: Any, where: str) -> str:
        """A symbol for ``form``, found at ``where``."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        writer = getattr(self, f"_write_{kind}", None) if isinstance(kind, str) else None
        if writer is None:
            raise TagError(f"{where}.type: {kind!r} is not a kind of format that octavo knows")
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise TagError(f"{where}: more than {MAX_NESTING} formats inside one another")
        symbol: str = writer(form, where)
        self._depth -= 1
        return symbol

    # ---- text and marks

    def _literal(self, text: str, *, by_character: bool = False) -> str:
        """Fixed text; what spells a special token is that token."""
        symbols = []
        for piece in self._cut.split(text) if self._cut is not None else [text]:
            if piece in self._special:
                symbols.append(f"<[{self._special[piece]}]>")
            elif piece:
                symbols += map(quote, piece) if by_character else [quote(piece)]
        return " ".join(symbols) or '""'

    def _text_until(self, end: str) -> str:
        """Any text up to the first ``end``, and ``end``."""
        special = self._cut.match(end) if self._cut is not None else None
        if special is not None:  # text never holds a special token, so it ends there by itself
            return self._rule(f"/(?s:.*)/ {self._literal(end)}")
        first = self._cut.split(end)[0] if self._cut is not None else end
        lazy = self._rule(f"/(?s:.*){_escape(first)}/", "[lazy]")
        return self._rule(f"{lazy} {self._literal(end[len(first) :])}") if len(first) < len(end) else lazy

    def _write_const_string(self, form: Mapping[str, Any], where: str) -> str:
        return self._rule(self._literal(_get(form, "value", str, where)))

    def _write_any_text(self, form: Mapping[str, Any], where: str) -> str:
        return self._rule("/(?s:.*)/")

    def _write_json_schema(self, form: Mapping[str, Any], where: str) -> str:
        return self._rule(self._schema(_get(form, "json_schema", (Mapping, bool), where)))

    def _write_regex(self, form: Mapping[str, Any], where: str) -> str:
        return self._rule(regex_literal(_get(form, "pattern", str, where)))

    def _write_grammar(self, form: Mapping[str, Any], where: str) -> str:
        return self._rule(self._grammar(_get(form, "grammar", str, where)))

    # ---- structure

    def _write_sequence(self, form: Mapping[str, Any], where: str) -> str:
        elements, symbols, skip = _get(form, "elements", list, where), [], False
        for i, element in enumerate(elements):
            if skip:
                skip = False
                continue
            place, follower = f"{where}.elements[{i}]", elements[i + 1] if i + 1 < len(elements) else None
            if _kind(element) == "any_text" and isinstance(follower, Mapping) and _kind(follower) == "const_string":
                symbols.append(self._text_until(_get(follower, "value", str, f"{where}.elements[{i + 1}]")))
                skip = True
            elif _kind(element) == "any_text" and follower is not None:
                raise TagError(f"{place}: any_text must be last, or be followed by a const_string")
            else:
                symbols.append(self.write(element, place))
        return self._rule(" ".join(symbols) or '""')

    def _write_or(self, form: Mapping[str, Any], where: str) -> str:
        elements = _get(form, "elements", list, where)
        if not elements:
            raise TagError(f"{where}.elements: must not be empty")
        return self._rule(" | ".join(self.write(e, f"{where}.elements[{i}]") for i, e in enumerate(elements)))

    def _write_tag(self, form: Mapping[str, Any], where: str) -> str:
        return self._rule(f"{self._literal(_get(form, 'begin', str, where))} {self._rest(form, where)}")

    def _rest(self, form: Mapping[str, Any], where: str) -> str:
        """Content and end of a tag. Several possible ends are alternatives."""
        ends = form.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise TagError(f"{where}.end: must be a string, or a list of them")
        content = _get(form, "content", Mapping, where)
        if _kind(content) == "any_text" and all(ends):
            return self._rule(" | ".join(map(self._text_until, ends)))
        return self._rule(
            f"{self.write(content, where + '.content')} {self._rule(' | '.join(map(self._literal, ends)))}"
        )

    def _tags(self, form: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
        """(beginning, symbol of the rest) of each tag."""
        tags = _get(form, "tags", list, where)
        if not tags:
            raise TagError(f"{where}.tags: must not be empty")
        places = [f"{where}.tags[{i}]" for i in range(len(tags))]
        for tag, place in zip(tags, places, strict=True):
            if not isinstance(tag, Mapping):
                raise TagError(f"{place}: must be a tag")
        return [(_get(t, "begin", str, p), self._rest(t, p)) for t, p in zip(tags, places, strict=True)]

    def _any_tag(self, tags: Sequence[tuple[str, str]], skip: str = "") -> str:
        """One of ``tags``, whose beginnings are known to begin with ``skip``, which is there already."""
        begins = [begin[len(skip) :] for begin, _ in tags]
        # llguidance takes the longest terminal: of two beginnings, one of which begins the other, it would lose one
        clash = any(a != b and b.startswith(a) for a in begins for b in begins)
        options = [
            f"{self._literal(begin, by_character=clash)} {rest}" for begin, (_, rest) in zip(begins, tags, strict=True)
        ]
        return self._rule(" | ".join(options))

    def _write_tags_with_separator(self, form: Mapping[str, Any], where: str) -> str:
        tag = self._any_tag(self._tags(form, where))
        more = "" if form.get("stop_after_first") else f" ({self._literal(form.get('separator', ''))} {tag})*"
        body = f"{tag}{more}"
        return self._rule(body if form.get("at_least_one") else f"({body})?")

    def _write_triggered_tags(self, form: Mapping[str, Any], where: str) -> str:
        triggers, tags = _get(form, "triggers", list, where), self._tags(form, where)
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise TagError(f"{where}.triggers: must be a list of one or more non-empty strings")
        calls = []
        for trigger in triggers:
            mine = [tag for tag in tags if tag[0].startswith(trigger)]
            if mine:
                calls.append(f"{self._text_until(trigger)} {self._any_tag(mine, skip=trigger)}")
        lost = next((begin for begin, _ in tags if not any(begin.startswith(t) for t in triggers)), None)
        if lost is not None:
            raise TagError(f"{where}.tags: {lost!r} begins with none of the triggers")
        call, text = self._rule(" | ".join(calls)), self._rule("/(?s:.*)/")
        if form.get("stop_after_first"):
            return self._rule(call if form.get("at_least_one") else f"{call} | {text}")
        return self._rule(f"{call}{'+' if form.get('at_least_one') else '*'} {text}")


def _escape(text: str) -> str:
    """``text`` inside a regular expression between slashes."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _kind(form: Any) -> Any:
    return form.get("type") if isinstance(form, Mapping) else None


def _get(form: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    value = form.get(key)
    if not isinstance(value, kind):
        names = {str: "a string", list: "a list", Mapping: "an object"}
        raise TagError(f"{where}.{key}: must be {names.get(kind, 'a JSON schema')}")
    return value


def _triggered(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older form as a format."""
    structures, triggers = (
        _get(tag, "structures", list, "structural_tag"),
        _get(tag, "triggers", list, "structural_tag"),
    )
    tags = []
    for i, structure in enumerate(structures):
        where = f"structures[{i}]"
        if not isinstance(structure, Mapping):
            raise TagError(f"{where}: must be an object")
        schema = structure.get("schema", structure.get("structure", True))
        content = {"type": "json_schema", "json_schema": schema}
        end = structure.get("end", "")
        tags.append({"type": "tag", "begin": _get(structure, "begin", str, where), "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
