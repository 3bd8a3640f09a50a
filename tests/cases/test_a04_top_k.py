"""A04: top_k beyond the vocabulary, fractional, off; and a greedy request beside ones that draw."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.cases.asking import answered, ask, refused
from tests.server.running_server import RunningServer


@pytest.mark.parametrize("top_k", [-1, 0, 49152, 49153, 2**31, 2**63, 10**30])
def test_off_and_beyond_the_vocabulary_are_the_same(llm: LLM, top_k: int) -> None:
    asked: dict[str, Any] = {"temperature": 1.3, "seed": 11, "max_tokens": 6}
    (plain,), (other,) = (
        llm.generate("Winter is", SamplingParams(**asked, **more), use_tqdm=False) for more in ({}, {"top_k": top_k})
    )
    assert plain.outputs[0].token_ids == other.outputs[0].token_ids


def test_one_is_greedy(llm: LLM) -> None:
    ones = [
        SamplingParams(top_k=1, temperature=1.9, seed=3, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12),
    ]
    first, second = llm.generate(["Winter is"] * 2, ones, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("top_k", [0.5, -2, 3.0, "5", True, -(10**40)])
def test_what_is_no_count_is_refused(live_server: RunningServer, top_k: Any) -> None:
    refused(ask(live_server, prompt="x", top_k=top_k), "top_k")


def test_a_greedy_answer_is_its_own_beside_others(live_server: RunningServer) -> None:
    greedy = {"prompt": "The opposite of cold is", "temperature": 0, "max_tokens": 20}
    random = {"prompt": "The opposite of", "temperature": 1.7, "top_k": 4, "max_tokens": 30}
    alone = answered(ask(live_server, **greedy))["choices"][0]["text"]
    with ThreadPoolExecutor(9) as pool:
        running = [pool.submit(ask, live_server, **(greedy if i % 3 == 0 else random)) for i in range(9)]
        answers = [answered(future.result())["choices"][0]["text"] for future in running]
    assert set(answers[::3]) == {alone}
