"""What a request asks for, written as a grammar of llguidance. Runs in the checker's process; compiles nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.exceptions import ValidationError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.ebnf import EbnfError, ebnf_to_lark, is_ebnf
from octavo.structured_output.structural_tag import TagError, TagWriter, quote, regex_literal

# Text that the grammar leaves no choice about is the model's to cut into tokens. Otherwise llguidance would look up to
# the end of such text and cut it with the model's tokenizer in every step: 3 us a byte, so 0.3 s for x{100000}.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'

MAX_SCHEMA_NESTING = 100  # objects and lists inside one another


def refuse(params: StructuredOutputsParams, message: str) -> ValidationError:
    """The error that names the field at fault."""
    field = f"structured_outputs.{params.kind}"
    return ValidationError(f"{field}: {message}", parameter=field)


def translate(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """The grammar, as text that ``LLMatcher`` takes. ``special``: the model's special tokens, by their text.

    Raises ValidationError naming the field; whether the grammar makes sense shows when it is compiled.
    """
    try:
        return _Translation(params, special).text()
    except (EbnfError, TagError) as error:
        raise refuse(params, str(error)) from None
    except RecursionError:
        raise refuse(params, "nested too deeply") from None


class _Translation:
    def __init__(self, params: StructuredOutputsParams, special: Mapping[str, int]) -> None:
        self._params, self._special = params, special
        self._grammars: list[dict[str, Any]] = []  # those that others refer to by name

    def text(self) -> str:
        params = self._params
        if params.json is not None and params.json is not False:
            main = f"start: {self._json(self._parsed(params.json))}\n"
        elif params.json_object:
            main = f"start: {self._json({'type': 'object'})}\n"
        elif params.regex is not None:
            main = f"start: {regex_literal(params.regex)}\n"
        elif params.choice is not None:
            main = f"start: CHOICE\nCHOICE: {' | '.join(map(quote, params.choice))}\n"
        elif params.grammar is not None:
            main = self._lark(params.grammar)
        else:
            main = self._tag()
        return json.dumps({"grammars": [{"lark_grammar": main + OPTIONS}, *self._grammars]})

    def _lark(self, grammar: str) -> str:
        return ebnf_to_lark(grammar) if is_ebnf(grammar) else grammar

    def _parsed(self, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value, parse_constant=_no_constant)
            except ValueError as error:
                raise refuse(self._params, f"not valid JSON: {error}") from None
        return value

    def _json(self, schema: Any) -> str:
        """A JSON schema as a symbol of Lark."""
        return f"%json {json.dumps(self._schema(schema))}"

    def _schema(self, schema: Any) -> Any:
        """The schema with the request's options in it, in the way that llguidance reads them."""
        if not isinstance(schema, Mapping | bool):
            raise refuse(self._params, f"a JSON schema is an object or a boolean, got {type(schema).__name__}")
        options: dict[str, Any] = {}
        if self._params.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if self._params.whitespace_pattern is not None:
            options["whitespace_pattern"] = self._params.whitespace_pattern
        plain = _closed(schema) if self._params.disable_additional_properties else schema
        if not options:
            return plain
        given: Any = plain if isinstance(plain, Mapping) else ({} if plain else {"not": {}})
        own = given.get("x-guidance")
        return {**given, "x-guidance": {**(own if isinstance(own, Mapping) else {}), **options}}

    def _tag(self) -> str:
        tag = self._parsed(self._params.structural_tag)
        if not isinstance(tag, Mapping):
            raise refuse(self._params, f"must be an object, got {type(tag).__name__}")
        return TagWriter(
            self._special,
            schema=self._json,
            grammar=self._named,
        ).grammar(tag)

    def _named(self, grammar: str) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": self._lark(grammar)})
        return f"@{name}"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _closed(schema: Any, depth: int = 0) -> Any:
    """``schema`` with ``additionalProperties: false`` in every object that lists properties and says nothing else."""
    if depth > MAX_SCHEMA_NESTING:
        raise RecursionError
    if isinstance(schema, list):
        return [_closed(item, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {
        key: value if key in ("const", "enum", "default", "examples") else _closed(value, depth + 1)
        for key, value in schema.items()
    }
    lists = isinstance(schema.get("properties"), Mapping) or isinstance(schema.get("patternProperties"), Mapping)
    if lists and not {"additionalProperties", "unevaluatedProperties"} & schema.keys():
        closed["additionalProperties"] = False
    return closed
