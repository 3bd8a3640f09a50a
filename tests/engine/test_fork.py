"""n samples of one request answer like n requests, bit for bit, whatever happens to their shared blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from octavo.engine.llm_engine import LLMEngine
from octavo.messages import EngineCoreRequest, RequestOutputKind, SamplingParams, TokenLogprobs

PROMPT = [7 * i % 300 for i in range(37)]  # two full blocks and a part of a third
BACKENDS = {
    "reference": {"backend": "reference"},
    "cpu, bf16 KV": {"backend": "cpu", "kv_cache_dtype": "bfloat16", "weights_cache": False},
    "cpu, int8 KV": {"backend": "cpu", "kv_cache_dtype": "int8", "weights_cache": False},
}
PARAMS = {
    "random": {"temperature": 1.0, "seed": 7, "logprobs": 2, "max_tokens": 12},
    "processors": {"temperature": 0.8, "seed": 8, "presence_penalty": 1.0, "logit_bias": {9: 2.0}, "max_tokens": 12},
}
Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BACKENDS[request.param]


def answers(engine: LLMEngine, requests: Sequence[EngineCoreRequest]) -> tuple[dict[str, Answer], int]:
    """What the core says of each sequence, and how many tokens it computed."""
    client, num_computed = engine._client, 0
    found: dict[str, Answer] = {}
    client.submit(requests)
    while client.has_work():
        outputs = client.step()
        assert outputs.stats is not None
        num_computed += outputs.stats.iteration_tokens
        for output in outputs.outputs:
            assert output.error is None
            tokens, logprobs, prompt_logprobs = found.setdefault(output.request_id, ([], [], []))
            tokens += output.new_token_ids
            logprobs += output.new_logprobs or []
            prompt_logprobs += output.new_prompt_logprobs or []
    client.check_invariants()
    return found, num_computed


def request_of(name: str, n: int, **changes: Any) -> EngineCoreRequest:
    params = SamplingParams(n=n, ignore_eos=True, **changes)
    return EngineCoreRequest(request_id=name, prompt_token_ids=PROMPT, sampling_params=params, arrival_time=0.0)


@pytest.mark.parametrize("kind", PARAMS)
def test_samples_answer_like_separate_requests(backend: dict[str, Any], engines: Any, kind: str) -> None:
    request = request_of("r", 4, **PARAMS[kind])
    apart = engines(**backend, enable_prefix_caching=False)
    expected: dict[str, Answer] = {}
    for sample in request.samples():
        expected |= answers(apart, [sample])[0]
    assert len({tuple(tokens) for tokens, _, _ in expected.values()}) == 4
    for depth in (1, 2):
        for caching in (True, False):
            engine = engines(**backend, enable_prefix_caching=caching, pipeline_depth=depth)
            found, num_computed = answers(engine, [request])
            assert found == expected, (depth, caching, "cold")
            extra = 4 * (depth - 1)  # the step after the last one was already planned
            assert len(PROMPT) + 4 * 11 <= num_computed <= len(PROMPT) + 4 * 11 + extra
            assert answers(engine, [request])[0] == expected, (depth, caching, "warm")


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_in_waves_and_preempted(backend: dict[str, Any], engines: Any, caching: bool) -> None:
    request = request_of("r", 5, **PARAMS["random"] | {"max_tokens": 40})
    crowd = [request_of(f"c{i}", 2, temperature=1.0, seed=i, max_tokens=50) for i in range(2)]
    roomy = engines(**backend)
    expected, _ = answers(roomy, [request, *crowd])
    assert len(expected) == 9
    tight = engines(
        **backend,
        enable_prefix_caching=caching,
        max_num_seqs=3,
        kv_cache_memory=12 * roomy.info.kv_cache_bytes // roomy.info.num_blocks,
        max_model_len=128,
    )
    found, num_computed = answers(tight, [request, *crowd])
    assert found == expected
    assert num_computed > (1 if caching else 3) * len(PROMPT) + 5 * 39 + 4 * 49, "nothing was computed again"


def test_greedy_samples_are_equal_and_prompt_logprobs_come_once(backend: dict[str, Any], engines: Any) -> None:
    request = request_of("r", 3, temperature=0.0, prompt_logprobs=1, max_tokens=5)
    found, num_computed = answers(engines(**backend), [request])
    assert len({tuple(tokens) for tokens, _, _ in found.values()}) == 1
    assert [len(prompt_logprobs) for _, _, prompt_logprobs in found.values()] == [len(PROMPT) - 1, 0, 0]
    assert num_computed == len(PROMPT) + 3 * 4


def test_every_output_of_the_request_has_the_prompt_logprobs(engines: Any) -> None:
    engine = engines()
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE):
        params = SamplingParams(n=3, prompt_logprobs=1, max_tokens=4, ignore_eos=True, output_kind=kind)
        engine.add_request(PROMPT, params)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        assert all(output.prompt_logprobs is not None for output in outputs)
        assert {len(output.prompt_logprobs) for output in outputs} == {len(PROMPT)}
        assert [sample.index for sample in outputs[-1].outputs] == [0, 1, 2]


def test_a_request_that_cannot_be_taken_in_fails_with_all_its_samples(engines: Any) -> None:
    engine = engines()
    request = msgspec.structs.replace(request_of("r", 3), prompt_token_ids=[10**6])
    client = engine._client
    client.submit([request])
    ends = {}
    while client.has_work():
        ends |= {output.request_id: output.finish_reason for output in client.step().outputs}
    assert ends == {"r.0": "error", "r.1": "error", "r.2": "error"}
    client.check_invariants()
