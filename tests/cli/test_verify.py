"""``verify`` proves what it says, and would notice a difference of one bit."""

from __future__ import annotations

import copy
import math

import pytest

from octavo.cli.main import main
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.verify.comparison import VerifyResult, difference


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


def test_the_command_fails_on_a_difference(
    smollm2_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = VerifyResult("batch of 16", False, "request 3: token 1 is 9, not 2", 16, 384)
    monkeypatch.setattr("octavo.cli.verify.verify_model", lambda model, **settings: [result])
    assert main(["verify", smollm2_path]) == 1
    assert "NOT equal: batch of 16" in capsys.readouterr().out
