"""Log-probabilities in OpenAI's two shapes: chat's and completions'. Every number is finite (-9999.0 at least)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.outputs import Logprob
from octavo.entrypoints.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from octavo.tokenizer.base import Tokenizer

FLOOR = -9999.0  # the value that clients of vLLM know
Entries = Sequence[Mapping[int, Logprob] | None]


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _by_rank(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: item[1].rank or 0)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], top: int
) -> ChatLogprobs:
    """One entry a token: its own logprob, and the ``top`` likeliest tokens by rank."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        likeliest = [
            TopLogprob(_text(tokenizer, i), max(lp.logprob, FLOOR), list(tokenizer.token_bytes(i)))
            for i, lp in _by_rank(entry)[:top]
        ]
        own = max(entry[token_id].logprob, FLOOR)
        content.append(TokenLogprob(_text(tokenizer, token_id), own, list(tokenizer.token_bytes(token_id)), likeliest))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Entries, offset: int
) -> tuple[CompletionLogprobs, int]:
    """(parallel lists, the offset after them). An entry of None is the first prompt token, which has no logprob.

    ``top_logprobs`` always has the token itself, so it may be one longer than asked for, as OpenAI documents.
    """
    result = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = _text(tokenizer, token_id)
        result.tokens.append(text)
        result.text_offset.append(offset)
        offset += len(text)
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            result.token_logprobs.append(max(entry[token_id].logprob, FLOOR))
            # two ids may read alike (bytes of a broken character): the likelier one keeps the name
            table: dict[str, float] = {}
            for i, lp in _by_rank(entry):
                table.setdefault(_text(tokenizer, i), max(lp.logprob, FLOOR))
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
