"""Two runs of the same requests, compared as bits: token ids, finish reasons and all returned logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput

Logprobs = Sequence[dict[int, Logprob] | None]


@dataclass(frozen=True)
class VerifyResult:
    """One way of running the requests, against the reference. ``detail``: what happened, or the first difference."""

    name: str
    equal: bool
    detail: str
    num_requests: int
    num_tokens: int


def difference(expected: RequestOutput, got: RequestOutput) -> str | None:
    """Where two outputs part, or None if they agree in every bit."""
    for one, other in zip(expected.outputs, got.outputs, strict=True):
        if found := _sample_difference(one, other):
            return f"sample {one.index}: {found}" if len(expected.outputs) > 1 else found
    return _logprobs_difference("prompt", expected.prompt_logprobs, got.prompt_logprobs)


def _sample_difference(one: CompletionOutput, other: CompletionOutput) -> str | None:
    if one.finish_reason == "error" or other.finish_reason == "error":
        return f"failed: {other.stop_reason or one.stop_reason}"
    for position, (left, right) in enumerate(zip(one.token_ids, other.token_ids)):
        if left != right:
            return f"token {position} is {right}, not {left}"
    if len(one.token_ids) != len(other.token_ids) or one.finish_reason != other.finish_reason:
        return f"ended after {len(other.token_ids)} tokens ({other.finish_reason}), not {len(one.token_ids)}"
    return _logprobs_difference("output", one.logprobs, other.logprobs)


def _logprobs_difference(kind: str, ours: Logprobs | None, theirs: Logprobs | None) -> str | None:
    if len(ours or ()) != len(theirs or ()):
        return f"{len(theirs or ())} {kind} logprobs, not {len(ours or ())}"
    for position, (left, right) in enumerate(zip(ours or (), theirs or ())):
        if left != right:
            return f"{kind} logprobs at {position}: {right} instead of {left}"
    return None


def compare(name: str, expected: list[RequestOutput], got: list[RequestOutput], note: str) -> VerifyResult:
    """The result named ``name``: ``note`` if every output equals the one expected, else the first difference."""
    tokens = count_tokens(got)
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        if found := difference(left, right):
            return VerifyResult(name, False, f"request {number}: {found}", len(got), tokens)
    return VerifyResult(name, True, note, len(got), tokens)


def count_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Tokens in all samples of ``outputs``."""
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
