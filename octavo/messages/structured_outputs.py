"""StructuredOutputsParams: what the text of an answer must look like. Says nothing of how that is enforced."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.exceptions import ValidationError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one constraint, with vLLM's names; otherwise ValidationError (parameter ``structured_outputs``)."""

    json: str | dict[str, Any] | bool | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or EBNF as llama.cpp and xgrammar write it
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise ValidationError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {got}",
                parameter="structured_outputs",
            )

    @property
    def kind(self) -> str:
        """The name of the one constraint that is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))
