"""The default model answers the same, to the bit, whatever finds its prefixes, keeps its KV and takes it away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.config.choices import PREFIX_INDEXES
from octavo.engine.llm_engine import LLMEngine
from octavo.messages import EngineCoreRequest, SamplingParams, TokenLogprobs
from tests.pairwise import pairwise

pytest.importorskip("octavo.backends.cpu._kernels", reason="the CPU kernels are not built")

SYSTEM = [50 + 7 * i for i in range(40)]  # all prompts begin so: two full blocks, and half of a third
PROMPTS = [SYSTEM + [900 + 31 * i + 5 * j for j in range(6 + 9 * i)] for i in range(4)]
MAX_TOKENS = 24
BLOCKS = {1: 14, 4: 24}  # by n: room for all prompts at once, but not for all answers
PARAMS: dict[str, Any] = {"temperature": 0.9, "seed": 5, "logprobs": 1, "ignore_eos": True, "max_tokens": MAX_TOKENS}
Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


class Run(NamedTuple):
    """What came of all requests."""

    answers: Answers
    num_preemptions: int
    num_loaded: dict[str, int]  # bytes, by tier
    num_cached: int  # tokens


def open_engine(model: str, **settings: Any) -> LLMEngine:
    return LLMEngine(
        resolve_engine_config(engine_config_from_kwargs(model=model, max_model_len=128, threads=1, **settings), None)
    )


def run(engine: LLMEngine, n: int, prompts: list[list[int]]) -> Run:
    requests = [
        EngineCoreRequest(
            request_id=f"r{len(prompt)}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(n=n, **PARAMS),
            arrival_time=0.0,
        )
        for prompt in prompts
    ]
    engine._client.submit(requests)
    answers: Answers = {}
    loaded = {"host": 0, "disk": 0}
    cached: dict[str, int] = {}
    preemptions: dict[str, int] = {}
    while engine._client.has_work():
        outputs = engine._client.step()
        assert outputs.stats is not None
        for tier, stats in outputs.stats.kv_tiers.items():
            loaded[tier] += stats.loaded_bytes_delta
        for output in outputs.outputs:
            assert output.error is None
            tokens, logprobs = answers.setdefault(output.request_id, ([], []))
            tokens += output.new_token_ids
            logprobs += output.new_logprobs or []
            if output.facts is not None:
                cached[output.request_id] = output.facts.num_cached_tokens
                preemptions[output.request_id] = output.facts.num_preemptions
    engine.check_invariants()
    return Run(answers, sum(preemptions.values()), loaded, sum(cached.values()))


@pytest.fixture(scope="module")
def block_bytes(smollm2_path: str) -> int:
    engine = open_engine(smollm2_path)
    size = engine.info.kv_cache_bytes // engine.info.num_blocks
    engine.shutdown()
    return size


@pytest.fixture(scope="module")
def alone(smollm2_path: str) -> Iterator[dict[int, Answers]]:
    """By n: each request by itself, in a pool that is large enough, nothing cached."""
    engine = open_engine(smollm2_path, enable_prefix_caching=False)
    yield {
        n: {name: answer for prompt in PROMPTS for name, answer in run(engine, n, [prompt]).answers.items()}
        for n in (1, 4)
    }
    engine.shutdown()


@pytest.mark.parametrize(("index", "mode", "n"), pairwise([*PREFIX_INDEXES], ["recompute", "swap"], [1, 4]))
def test_cold_warm_and_after_a_restart(
    index: str, mode: str, n: int, smollm2_path: str, block_bytes: int, alone: dict[int, Answers], tmp_path: Path
) -> None:
    settings = {
        "kv_cache_memory": (BLOCKS[n] + 1) * block_bytes,
        "kv_cache_dir": str(tmp_path),
        "preemption_mode": mode,
        "prefix_index": index,
        "swap_space": 0.05 if mode == "swap" else 0.0,
        "pipeline_depth": 2,
    }
    runs: dict[str, Run] = {}
    for first, second in (("cold", "warm"), ("after a restart", "warm again")):
        engine = open_engine(smollm2_path, **settings)
        for name in (first, second):
            runs[name] = run(engine, n, PROMPTS)
            assert runs[name].answers == alone[n], name
            assert runs[name].num_preemptions > 0, name
        engine.shutdown()
    assert runs["cold"].num_cached < runs["after a restart"].num_cached
    assert runs["after a restart"].num_loaded["disk"] > 0
    assert (runs["cold"].num_loaded["host"] > 0) == (mode == "swap")
