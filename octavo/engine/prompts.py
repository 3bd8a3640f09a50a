"""The forms in which Python callers write a prompt. Knows nothing of tokenizers or limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from octavo.exceptions import ValidationError

Prompt = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")
ABSENT = {"prompt_embeds": "prompt embeddings", "multi_modal_data": "images, audio and video"}


class ParsedPrompt(NamedTuple):
    """``prompt`` is what is to be continued; ``text`` what RequestOutput.prompt says."""

    prompt: str | Sequence[int]
    text: str | None
    cache_salt: str | None


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` (which comes first), and ``cache_salt``.

    Raises ValidationError for other keys, and naming the feature where octavo lacks it.
    """
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(prompt, prompt if isinstance(prompt, str) else None, None)
    given = {key: value for key, value in prompt.items() if value is not None}
    for key, what in ABSENT.items():
        if key in given:
            raise ValidationError(f"{key}: octavo takes no {what}, only text and token ids", parameter=key)
    if set(given) - set(KEYS) or not {"prompt", "prompt_token_ids"} & set(given):
        raise ValidationError(
            f"a prompt dict has prompt or prompt_token_ids, and perhaps cache_salt; got {sorted(map(str, prompt))}",
            parameter="prompt",
        )
    text = given.get("prompt")
    if text is not None and not isinstance(text, str):
        raise ValidationError("the prompt of a prompt dict must be text", parameter="prompt")
    wanted: Any = given.get("prompt_token_ids", text)
    return ParsedPrompt(wanted, text, given.get("cache_salt"))
