"""Whatever memory lies behind the pool, the answers are the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.engine.llm_engine import LLMEngine
from octavo.messages import EngineCoreRequest, SamplingParams
from tests.engine.test_fork import BACKENDS, Answer, answers

LONG = [5 * i % 300 for i in range(90)]
PARAMS: dict[str, Any] = {"temperature": 0.9, "seed": 3, "logprobs": 2, "ignore_eos": True}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BACKENDS[request.param]


def request_of(name: str, prompt: list[int], n: int = 1, max_tokens: int = 12) -> EngineCoreRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, **PARAMS)
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0)


def crowd(n: int) -> list[EngineCoreRequest]:
    """Requests that begin with one or two blocks and end with twice as many."""
    return [request_of(f"r{i}", LONG[3 * i : 3 * i + 14 + 2 * i], n, max_tokens=30) for i in range(5)]


def alone(engine: LLMEngine, requests: list[EngineCoreRequest]) -> dict[str, Answer]:
    return {name: answer for request in requests for name, answer in answers(engine, [request])[0].items()}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_requests_go_on_where_they_were(backend: dict[str, Any], engines: Any, n: int, caching: bool) -> None:
    expected = alone(engines(**backend, enable_prefix_caching=False), crowd(n))
    computed = {}
    for mode in ("recompute", "swap"):
        for depth in (1, 2):
            engine = engines(
                num_blocks=7 if n == 1 else 12,
                **backend,
                enable_prefix_caching=caching,
                swap_space=0.001,
                preemption_mode=mode,
                pipeline_depth=depth,
            )
            got, computed[mode, depth] = answers(engine, crowd(n))
            assert got == expected, (mode, depth)
    if not caching:
        assert computed["swap", 1] < computed["recompute", 1]
        assert computed["swap", 2] < computed["recompute", 2]


def test_what_the_pool_evicts_is_found_again(backend: dict[str, Any], engines: Any) -> None:
    engine = engines(num_blocks=8, **backend, swap_space=0.001)
    first = request_of("first", LONG[:64])
    expected, _ = answers(engine, [first])
    answers(engine, [request_of("other", [7, *LONG, *LONG[:20]])])  # takes the whole pool
    engine._client.submit([request_of("again", LONG[:64])])
    outputs = []
    while engine._client.has_work():
        outputs += engine._client.step().outputs
    assert [token for output in outputs for token in output.new_token_ids] == expected["first"][0]
    facts = outputs[0].facts
    assert facts is not None
    assert (facts.num_cached_tokens, facts.num_external_tokens) == (48, 48)
    engine.check_invariants()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_prompt_is_found_after_a_restart(
    backend: dict[str, Any], engines: Any, tmp_path: Path, n: int, mode: str
) -> None:
    expected = alone(engines(**backend, enable_prefix_caching=False), [request_of("r", LONG, n)])
    tiers = {"kv_cache_dir": str(tmp_path), "swap_space": 0.001, "preemption_mode": mode}
    computed = []
    for _ in ("cold", "after a restart"):
        engine = engines(**backend, **tiers)
        for _ in ("cold", "warm"):
            got, num_computed = answers(engine, [request_of("r", LONG, n)])
            assert got == expected
            computed.append(num_computed)
        engine.shutdown()
    assert computed[0] > computed[1] == computed[2] == computed[3]


def test_what_computed_it_decides_where_it_is_found(tiny_model: str, engines: Any, tmp_path: Path) -> None:
    """Other kernels, another KV dtype, another size of blocks: other bits, or others in another place."""
    folders = []
    for changes in [*BACKENDS.values(), {**BACKENDS["cpu, bf16 KV"], "block_size": 32}]:
        engine = engines(**changes, kv_cache_dir=str(tmp_path), kv_tokens=1024)
        first, _ = answers(engine, [request_of("r", LONG)])
        again, _ = answers(engine, [request_of("r", LONG)])
        assert first == again
        engine.shutdown()
        folders.append(set(tmp_path.iterdir()))
    assert [len(found) for found in folders] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b"", b"x" * 50_000])
def test_damaged_files_cost_time_only(engines: Any, tmp_path: Path, damage: bytes) -> None:
    settings = {**BACKENDS["cpu, bf16 KV"], "kv_cache_dir": str(tmp_path)}
    first = engines(**settings)
    expected, whole = answers(first, [request_of("r", LONG)])
    first.shutdown()
    files = sorted(tmp_path.glob("*/*.kv"))
    assert len(files) == 6
    engine = engines(**settings)  # has seen the files before they are damaged
    for path in files:
        path.write_bytes(damage)
    got, _ = answers(engine, [request_of("r", LONG)])
    assert got == expected
    engine.shutdown()
    left = [path for path in files if path.read_bytes() == damage]
    assert len(left) == 1  # the block after the prompt, which nobody asked for
    last = engines(**settings)
    got, computed = answers(last, [request_of("r", LONG)])
    assert got == expected
    assert computed < whole
