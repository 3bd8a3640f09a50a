"""Models with sliding windows: transformers' tokens, and the same bits in a crowd, cut up, cached, preempted or forked.

Blocks before the windows are given back meanwhile, and others write into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.config import SpeculativeConfig
from octavo.engine.llm_engine import LLMEngine
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, SamplingParams, blocks_at_once
from tests.core.kv_parts import kv_specs
from tests.engine.tiny_llama import VOCAB, make_config, write_tokenizer
from tests.models.tiny import random_ids, reference_logits, save

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"head_dim": 8, "num_hidden_layers": 5, "sliding_window": 24, "sliding_window_pattern": 3}),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 20}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
}
LAYERS_PER_BLOCK = {"gemma3": 1, "mistral": 2, "qwen2": 1}
GROUPS = {"gemma3": 5, "mistral": 1, "qwen2": 2}
PROMPTS = [random_ids(count, seed=count) for count in (150, 1, 70, 33)]
PROMPTS += [PROMPTS[0][:96] + random_ids(20), PROMPTS[0][:64], PROMPTS[0]]
NGRAMS = SpeculativeConfig(
    method="ngram",
    num_speculative_tokens=6,
    prompt_lookup_min=1,
    prompt_lookup_max=3,
    disable_by_batch_size=16,
)
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Any]:
    kind, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp("windows")
    write_tokenizer(folder)
    return request.param, str(folder), save(folder, kind, vocab_size=VOCAB, **config)


def engine_of(name: str, folder: str, *, blocks: int = 400, **changes: Any) -> LLMEngine:
    bytes_per_block = (
        16 * 2 * 2 * 2 * 8 * LAYERS_PER_BLOCK[name]
    )  # tokens, K and V, bfloat16, KV heads, head_dim, layers
    changes = {"backend": "cpu", "weights_cache": False, "kv_cache_memory": blocks * bytes_per_block} | changes
    engine = LLMEngine(make_config(folder, max_model_len=250, **changes))
    assert engine.info.num_blocks == blocks
    return engine


def answers(engine: LLMEngine, prompts: Sequence[list[int]], **params: Any) -> tuple[Answers, int, int]:
    """Tokens and their logprobs in the order of the prompts and samples; preemptions, and cached tokens."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "logprobs": 0, "ignore_eos": True, **params})
    requests = [
        EngineCoreRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling_params=sampling, arrival_time=0.0)
        for i, prompt in enumerate(prompts)
    ]
    engine._client.submit(requests)
    found: dict[str, tuple[list[int], list[float]]] = {}
    preemptions: dict[str, int] = {}
    cached: dict[str, int] = {}
    while engine._client.has_work():
        for output in engine._client.step().outputs:
            assert output.error is None
            tokens, logprobs = found.setdefault(output.request_id, ([], []))
            tokens += output.new_token_ids
            logprobs += [entry.logprobs[0] for entry in output.new_logprobs or []]
            if output.facts is not None:
                cached[output.request_id] = output.facts.num_cached_tokens
                preemptions[output.request_id] = output.facts.num_preemptions
    engine._client.check_invariants()
    return [found[name] for name in sorted(found)], sum(preemptions.values()), sum(cached.values())


def count_loads(engine: LLMEngine) -> list[int]:
    """Bytes that each step to come loads from host memory."""
    loaded, step = [], engine._client.step

    def counting() -> EngineCoreOutputs:
        outputs = step()
        assert outputs.stats is not None
        loaded.append(outputs.stats.kv_tiers["host"].loaded_bytes_delta)
        return outputs

    engine._client.step = counting  # type: ignore[method-assign]
    return loaded


@pytest.fixture(scope="module")
def alone(model: tuple[str, str, Any]) -> Answers:
    engine = engine_of(model[0], model[1], enable_prefix_caching=False)
    found = [answers(engine, [prompt])[0][0] for prompt in PROMPTS]
    engine.shutdown()
    return found


def test_greedy_tokens_of_transformers(model: tuple[str, str, Any]) -> None:
    """In float32, from a prompt of many windows on."""
    name, folder, theirs = model
    sizes = {"kv_cache_memory": 400 * 4096 * LAYERS_PER_BLOCK[name], "backend": "reference"}
    engine = LLMEngine(make_config(folder, max_model_len=250, **sizes))
    (found,), _, _ = answers(engine, [PROMPTS[0]])
    engine.shutdown()
    ids = list(PROMPTS[0])
    for _ in range(40):
        ids.append(int(reference_logits(theirs, ids)[-1].argmax()))
    assert found[0] == ids[len(PROMPTS[0]) :]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"long_prefill_token_threshold": 7},
        {"threads": 2, "pipeline_depth": 1},
        {"enable_prefix_caching": False},
        {"speculative_config": NGRAMS},
        {"speculative_config": NGRAMS, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_a_crowd_cut_in_any_way(model: tuple[str, str, Any], alone: Answers, changes: dict[str, Any]) -> None:
    engine = engine_of(model[0], model[1], **changes)
    cold, _, _ = answers(engine, PROMPTS)
    warm, _, cached = answers(engine, PROMPTS)
    engine.shutdown()
    assert cold == alone
    assert warm == alone
    assert (cached > 300) == changes.get("enable_prefix_caching", True)


@pytest.mark.parametrize("changes", [{}, {"speculative_config": NGRAMS}], ids=["plain", "speculating"])
def test_preempted(model: tuple[str, str, Any], changes: dict[str, Any]) -> None:
    """Short prompts and long answers, in a pool that is too small even for what lies in the windows."""
    name, folder, _ = model
    growing = [random_ids(20 + i, seed=i) for i in range(7)]
    engine = engine_of(name, folder, enable_prefix_caching=False)
    assert engine.info.num_kv_groups == GROUPS[name]
    expected = [answers(engine, [prompt], max_tokens=100)[0][0] for prompt in growing]
    engine.shutdown()
    engine = engine_of(name, folder, blocks=1 + 9 * GROUPS[name], enable_prefix_caching=False, **changes)
    found, preemptions, _ = answers(engine, growing, max_tokens=100)
    engine.shutdown()
    assert found == expected
    assert preemptions > 0


def test_a_pool_that_holds_only_what_windows_see(model: tuple[str, str, Any], alone: Answers) -> None:
    """The longest sequence still runs: its blocks go back in time."""
    name, folder, _ = model
    windows = {"gemma3": [24, 24, 24, 24, None], "mistral": [20], "qwen2": [33, None]}[name]
    blocks = blocks_at_once(250, 16, kv_specs(windows), ahead=32)
    assert blocks < 16 * GROUPS[name]
    for depth in (1, 2):
        settings = {"max_num_batched_tokens": 32 // depth, "pipeline_depth": depth}
        engine = engine_of(name, folder, blocks=1 + blocks, **settings)
        assert engine.info.max_model_len == 250
        found, _, _ = answers(engine, [PROMPTS[0], PROMPTS[2]])
        (longest,), preemptions, _ = answers(engine, [PROMPTS[0]], max_tokens=100)
        engine.shutdown()
        assert found == [alone[0], alone[2]]
        assert len(longest[0]) == 100
        assert preemptions == 0


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_swapped(model: tuple[str, str, Any], caching: bool) -> None:
    """Preempted requests go on where they were: what their windows hold comes back, and nothing else."""
    name, folder, _ = model
    growing = [random_ids(20 + i, seed=i) for i in range(7)]
    settings = {"enable_prefix_caching": caching, "max_num_batched_tokens": 64}
    engine = engine_of(name, folder, **settings)
    expected = [answers(engine, [prompt], max_tokens=100)[0][0] for prompt in growing]
    engine.shutdown()
    for depth in (1, 2):
        small = {"blocks": 1 + 9 * GROUPS[name], "pipeline_depth": depth, "swap_space": 0.01}
        engine = engine_of(name, folder, **settings, **small, preemption_mode="swap")
        loaded = count_loads(engine)
        found, preemptions, _ = answers(engine, growing, max_tokens=100)
        engine.shutdown()
        assert found == expected
        assert preemptions > 0
        assert sum(loaded) > 0


def test_found_after_a_restart(model: tuple[str, str, Any], alone: Answers, tmp_path: Path) -> None:
    """And when the pool has evicted it."""
    name, folder, _ = model
    tiers = {"kv_cache_dir": str(tmp_path), "swap_space": 0.01, "blocks": 1 + 16 * GROUPS[name]}
    counts = []
    for _ in range(2):
        engine = engine_of(name, folder, **tiers)
        for _ in range(2):
            for prompt, expected in zip(PROMPTS, alone, strict=True):
                (found,), _, cached = answers(engine, [prompt])
                assert found == expected
                counts.append(cached)
        engine.shutdown()
    cold, warm, restarted, again = (counts[i : i + len(PROMPTS)] for i in range(0, len(counts), len(PROMPTS)))
    assert cold[0] == 0
    assert cold[4] >= 80
    assert warm == restarted == again == [len(prompt) // 16 * 16 - 16 * (len(prompt) % 16 == 0) for prompt in PROMPTS]


def test_forked(model: tuple[str, str, Any]) -> None:
    """n samples of a prompt of many windows, as requests of their own."""
    engine = engine_of(model[0], model[1], enable_prefix_caching=False)
    together, _, _ = answers(engine, [PROMPTS[0]], n=3, temperature=1.0, seed=5)
    again, _, _ = answers(engine, [PROMPTS[0], PROMPTS[2]], n=3, temperature=1.0, seed=5)
    engine.shutdown()
    assert len(together) == 3
    assert len({str(tokens) for tokens, _ in together}) == 3
    assert again[:3] == together
