"""Log-probabilities in OpenAI's two shapes: chat's and completions'. Every number is finite (-9999.0 at least)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.engine.outputs import Logprob
from octavo.tokenizer.base import Tokenizer

FLOOR = -9999.0  # the value that clients of vLLM know
Entries = Sequence[Mapping[int, Logprob] | None]


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def _name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _by_rank(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: item[1].rank or 0)


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]],
    top: int,
    *,
    ids: Sequence[int] | None = None,
    as_ids: bool = False,
) -> ChatLogprobs:
    """One entry a token: its own logprob, and the ``top`` likeliest tokens (-1: all), or those of ``ids``, by rank.

    A token that was chosen from beyond the ``top`` comes after them, so that it can be found there too.
    ``as_ids`` writes each token as ``token_id:17`` instead of its text, which several may share.
    """
    content = []
    spelt: dict[int, list[int]] = {}  # bytes of the tokens that came up

    def raw(token_id: int) -> list[int]:
        found = spelt.get(token_id)
        if found is None:
            found = spelt[token_id] = list(tokenizer.token_bytes(token_id))
        return found

    for token_id, entry in zip(token_ids, entries, strict=True):
        others = _by_rank(entry)
        if ids:
            others = [pair for pair in others if pair[0] in ids]
        elif top != -1:
            others = others[:top] + [pair for pair in others[top:] if top and pair[0] == token_id]
        listed = [TopLogprob(_name(tokenizer, i, as_ids), max(lp.logprob, FLOOR), raw(i)) for i, lp in others]
        own = max(entry[token_id].logprob, FLOOR)
        content.append(TokenLogprob(_name(tokenizer, token_id, as_ids), own, raw(token_id), listed))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Entries, offset: int, *, as_ids: bool = False
) -> tuple[CompletionLogprobs, int]:
    """(parallel lists, the offset after them). An entry of None is a prompt token that has no logprob.

    ``top_logprobs`` always has the token itself, so it may be one longer than asked for, as OpenAI documents.
    """
    result = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        result.tokens.append(_name(tokenizer, token_id, as_ids))
        result.text_offset.append(offset)
        offset += len(_name(tokenizer, token_id, False))
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            result.token_logprobs.append(max(entry[token_id].logprob, FLOOR))
            # two ids may read alike (bytes of a broken character): the likelier one keeps the name
            table: dict[str, float] = {}
            for i, lp in _by_rank(entry):
                table.setdefault(_name(tokenizer, i, as_ids), max(lp.logprob, FLOOR))
            result.top_logprobs.append(table)
    return result, offset


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The lists of ``first`` followed by those of ``second``."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(entries: Entries) -> list[Any]:
    """vLLM's shape of prompt_logprobs: per position ``{token id: {logprob, rank, decoded_token}}``, the first null."""
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": max(lp.logprob, FLOOR), "rank": lp.rank, "decoded_token": lp.decoded_token}
            for i, lp in _by_rank(entry)
        }
        for entry in entries
    ]
