"""Types of fields that a client can make very long. Each is refused at its first fault and above a bound.

Pydantic would else describe every wrong element: millions of errors, and half a minute of the event loop, for one body.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator

from octavo.entrypoints.http.field_errors import shown

MAX_IDS = 256 * 1024  # token ids in one list, prompts aside; entries of logit_bias
MAX_STOP_IDS = 4096  # each sample of a request keeps a set of them
MAX_STOP = 128  # each is looked for after every token
MAX_STOP_CHARS = 4096  # of one; as much is held back of every answer
MAX_WORD_CHARS = 1024  # of a bad word, which is tokenised in several spellings
MAX_WORDS = 64 * 1024  # bad_words, whose real limit is the server's
MAX_MESSAGES = 16 * 1024
MAX_PARTS = 1024  # content parts of one message
MAX_PROMPTS = 1024  # prompts of one completions request
MAX_METADATA = 16  # OpenAI's

T = TypeVar("T")


def _check_prompt(value: Any) -> Any:
    """``value`` if it is a text, a list of texts, a list of token ids, or a list of such lists."""
    kinds = set(map(type, value)) if type(value) is list else set()
    if type(value) is str or value == [] or kinds in ({str}, {int}):
        good = True
    else:
        good = kinds == {list} and len(value) <= MAX_PROMPTS and all(set(map(type, ids)) <= {int} for ids in value)
    if not good:
        raise ValueError(
            f"must be a text, a list of texts, a list of token ids, or a list of at most {MAX_PROMPTS} such lists, got "
            f"{shown(value)}"
        )
    if kinds == {str} and len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} texts; at most {MAX_PROMPTS} are allowed")
    return value


def _check_biases(value: Any) -> Any:
    if value is None:
        return None
    if type(value) is not dict or len(value) > MAX_IDS:
        got = f"{len(value)} entries" if type(value) is dict else shown(value)
        raise ValueError(f"must be an object with at most {MAX_IDS} entries, from token ids to numbers, got {got}")
    for key, bias in value.items():
        if type(bias) not in (int, float) or not abs(bias) < math.inf:  # isfinite() cannot take any integer
            raise ValueError(f"the bias of {key[:40]!r} must be a finite number, got {shown(bias)}")
    return value


def _check_metadata(value: Any) -> Any:
    if type(value) is dict and len(value) > MAX_METADATA:
        raise ValueError(f"may have at most {MAX_METADATA} entries, got {len(value)}")
    return value


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Biases = Annotated[
    dict[str, float] | None, PlainValidator(_check_biases, json_schema_input_type=dict[str, float] | None)
]
Metadata = Annotated[dict[str, str], BeforeValidator(_check_metadata), Field(max_length=MAX_METADATA)]
TokenIds = Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)]
StopIds = Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
Words = Annotated[list[Annotated[str, Field(max_length=MAX_WORD_CHARS)]], Field(max_length=MAX_WORDS, fail_fast=True)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP, fail_fast=True)]
Messages = Annotated[list[T], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Parts = Annotated[list[T], Field(max_length=MAX_PARTS, fail_fast=True)]
Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]
