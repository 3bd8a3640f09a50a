"""StructuredOutputsParams: what the text of an answer must look like. Says nothing of how that is enforced."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.config.engine import MAX_GRAMMAR_BYTES
from octavo.exceptions import ValidationError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties")
MAX_CHOICES = 10_000


def _fail(name: str, rule: str) -> None:
    field = f"structured_outputs.{name}"
    raise ValidationError(f"{field} must be {rule}", parameter=field)


def _check_length(name: str, characters: int) -> None:
    if characters > MAX_GRAMMAR_BYTES:
        _fail(name, f"at most {MAX_GRAMMAR_BYTES} characters, got {characters}")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one constraint, with vLLM's names; otherwise ValidationError (parameter ``structured_outputs``).

    Types and emptiness are checked here, sense where the constraint is compiled.
    """

    json: str | dict[str, Any] | bool | None = None  # a JSON schema
    regex: str | None = None  # of the whole text
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or EBNF as llama.cpp and xgrammar write it
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False  # JSON without optional white space
    disable_additional_properties: bool = False  # JSON objects have the properties that the schema lists
    whitespace_pattern: str | None = None  # regex of the optional white space in JSON

    @classmethod
    def of(cls, fields: dict[str, Any]) -> StructuredOutputsParams:
        """From a JSON object; null is absent. Raises ValidationError, also for a field that is unknown."""
        given = {name: value for name, value in fields.items() if name != "_backend"}  # vLLM's own, of no use here
        for name in given:
            if name not in cls.__struct_fields__:
                known = ", ".join(sorted(cls.__struct_fields__))
                message = f"structured_outputs has no field {name!r:.40}; known are {known}"
                raise ValidationError(message, parameter="structured_outputs")
        return cls(**{name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise ValidationError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {got}",
                parameter="structured_outputs",
            )
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool | None):
                _fail(name, "true or false")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            names = value if isinstance(value, dict) else ()
            right = isinstance(value, str | dict | None) or (name == "json" and isinstance(value, bool))
            if not right or not all(isinstance(key, str) for key in names):
                _fail(name, "a JSON object, or its text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                _fail(name, "a string")
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if isinstance(value, str):
                _check_length(name, len(value))
        for name in ("json", "grammar", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, str) and not value.strip():
                _fail(name, "more than white space")
        self._check_choice()

    def _check_choice(self) -> None:
        choice = self.choice
        if choice is None:
            return
        if not isinstance(choice, list) or not choice or not all(isinstance(text, str) and text for text in choice):
            _fail("choice", "a list of one or more non-empty strings")
        if len(choice) > MAX_CHOICES:
            _fail("choice", f"at most {MAX_CHOICES} strings, got {len(choice)}")
        _check_length("choice", sum(map(len, choice)))

    @property
    def kind(self) -> str:
        """The name of the one constraint that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False)
