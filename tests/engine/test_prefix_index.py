"""However a prefix is found, and wherever it ends, the answers are the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.messages import EngineCoreRequest, SamplingParams
from tests.engine.test_fork import Answer, answers

TEXT = [5 * i % 300 for i in range(90)]
# where each prompt leaves the first one; most do so within a block of 16
CUTS = (90, 75, 50, 47, 33, 32, 31, 17, 16, 15, 3, 89)
BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "bf16": {"backend": "cpu", "kv_cache_dtype": "bfloat16"},
    "int8": {"backend": "cpu", "kv_cache_dtype": "int8"},
    "fp8_e4m3": {"backend": "cpu", "kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"backend": "cpu", "kv_cache_dtype": "fp8_e5m2"},
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"weights_cache": False, **BACKENDS[request.param]}


def requests(n: int) -> list[EngineCoreRequest]:
    params = SamplingParams(n=n, max_tokens=10, temperature=0.9, seed=3, logprobs=2, ignore_eos=True)
    return [
        EngineCoreRequest(
            request_id=f"r{i}", prompt_token_ids=[*TEXT[:cut], 7, 300 + i], sampling_params=params, arrival_time=0.0
        )
        for i, cut in enumerate(CUTS)
    ]


@pytest.mark.parametrize("n", [1, 4])
def test_a_hit_within_a_block_changes_no_bit(backend: dict[str, Any], engines: Any, n: int) -> None:
    plain = engines(**backend, enable_prefix_caching=False)
    expected: dict[str, Answer] = {}
    for one in requests(n):
        expected |= answers(plain, [one])[0]
    computed: dict[tuple[str, str], int] = {}
    for index in ("hash", "radix"):
        one_by_one, crowd = engines(**backend, prefix_index=index), engines(**backend, prefix_index=index)
        found: dict[str, Answer] = {}
        computed[index, "one by one"] = 0
        for one in requests(n):
            got, num_computed = answers(one_by_one, [one])
            found |= got
            computed[index, "one by one"] += num_computed
        assert found == expected
        for state in ("cold", "warm"):
            got, computed[index, state] = answers(crowd, requests(n))
            assert got == expected
    for order in ("one by one", "warm"):
        assert computed["radix", order] < computed["hash", order]


def test_a_preempted_request_goes_on_within_its_block(engines: Any) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, logprobs=2, ignore_eos=True)
    growing = [
        EngineCoreRequest(
            request_id=f"r{i}", prompt_token_ids=TEXT[3 * i : 3 * i + 9], sampling_params=params, arrival_time=0.0
        )
        for i in range(5)
    ]
    plain = engines(enable_prefix_caching=False)
    expected = {name: answer for one in growing for name, answer in answers(plain, [one])[0].items()}
    size = plain.info.kv_cache_bytes // plain.info.num_blocks
    computed = {}
    for index in ("hash", "radix"):
        for depth in (1, 2):
            engine = engines(prefix_index=index, pipeline_depth=depth, kv_cache_memory=11 * size)
            got, computed[index, depth] = answers(engine, growing)
            assert got == expected
    alone = sum(len(one.prompt_token_ids) + 39 for one in growing)
    assert computed["hash", 1] > alone, "nobody was preempted"
    assert computed["radix", 1] <= computed["hash", 1]
