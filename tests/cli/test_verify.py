"""``verify`` proves what it says, and would notice a difference of one bit."""

from __future__ import annotations

import copy
import math

from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.entrypoints.verify import difference, verify_model


def output(tokens: list[int], logprob: float = -1.5, reason: str = "length") -> RequestOutput:
    entries = [{token: Logprob(logprob, 1, "x")} for token in tokens]
    return RequestOutput("0", None, [1], [CompletionOutput(0, "", tokens, 0.0, entries, reason)], True)


def test_every_kind_of_difference_is_seen() -> None:
    one = output([1, 2, 3])
    assert difference(one, copy.deepcopy(one)) is None
    assert "token 1 is 9, not 2" in str(difference(one, output([1, 9, 3])))
    assert "ended after 2" in str(difference(one, output([1, 2])))
    assert "logprobs at 0" in str(difference(one, output([1, 2, 3], math.nextafter(-1.5, 0))))
    assert difference(one, output([1, 2, 3], reason="stop")) is not None
    assert difference(one, output([1, 2, 3], reason="error")) is not None


def test_the_default_model_keeps_its_bits(smollm2_path: str) -> None:
    lines: list[str] = []
    results = verify_model(smollm2_path, quick=True, report=lines.append)
    assert [r.name for r in results if not r.equal] == [], "\n".join(lines)
    assert len(lines) == len(results) + 1
    assert {"preemption", "prefix cache, warm", "chunks of 7"} <= {r.name for r in results}
