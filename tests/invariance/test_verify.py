"""The promise of equal bits, end to end on SmolLM2 through the CPU backend, and that the check can fail."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.cli.main import main
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.verify.comparison import difference
from octavo.verify.ways import verify_model


@pytest.mark.timeout(900)  # it is the longest of all, and machines may be slow
def test_smollm2_answers_alike_to_the_bit(smollm2_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, which says what it proved."""
    assert main(["verify", smollm2_path]) == 0
    printed = capsys.readouterr().out
    assert "equal bit for bit" in printed
    names = {line[10:].partition(": ")[0] for line in printed.splitlines() if line.startswith("equal ")}
    assert {"batch of 16", "chunks of 7", "chunks of 64", "preemption"} <= names
    assert {f"prefix cache, {index}, {state}" for index in ("hash", "radix") for state in ("cold", "warm")} <= names
    assert {"preemption, swapped", "restart"} <= names
    assert {"speculation, alone", "speculation, together"} <= names
    for fact in ("threads: 1: ", "threads: 2: "):
        assert fact in printed


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_smollm2_with_small_kv_answers_alike_to_the_bit(smollm2_path: str, dtype: str) -> None:
    lines: list[str] = []
    results = verify_model(smollm2_path, quick=True, kv_cache_dtype=dtype, report=lines.append)
    assert all(result.equal for result in results), "\n".join(lines)
    names = {result.name for result in results}
    assert {"preemption, swapped", "restart", "chunks of 7", "preemption", "threads: 2"} <= names
    assert {"prefix cache, hash, warm", "prefix cache, radix, warm"} <= names


def test_one_bit_of_one_logprob_is_a_difference() -> None:
    entry = {7: Logprob(logprob=-0.5, rank=1, decoded_token="a")}
    completion = CompletionOutput(
        index=0, text="a", token_ids=[7], cumulative_logprob=-0.5, logprobs=[entry], finish_reason="length"
    )
    output = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[1], outputs=[completion], finished=True)
    assert difference(output, output) is None
    nudged = {7: Logprob(logprob=-0.5000000000000001, rank=1, decoded_token="a")}
    for change in ({"logprobs": [nudged]}, {"token_ids": [8]}, {"finish_reason": "stop"}):
        other = dataclasses.replace(output, outputs=[dataclasses.replace(completion, **change)])
        assert difference(output, other) is not None
