"""Logits of the reference backend equal transformers' in float32, for every kind of checkpoint the families read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.registry import make_backend
from octavo.config import BackendConfig, ModelConfig
from octavo.model_loader import LoadedModel, load_model
from octavo.models.registry import find_family
from tests.models.tiny import Sequence, prepare, random_ids, reference_logits, save, step, step_outputs

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "num_hidden_layers": 3,
    "sliding_window": 20,
    "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("Llama", {}),
    "mqa": ("Llama", {"num_key_value_heads": 1}),
    "mha": ("Llama", {"num_key_value_heads": 4}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "wide heads": ("Llama", {"head_dim": 16}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "yarn rope": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 20}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3 wide window": ("Gemma3", GEMMA | {"sliding_window": 100, "num_key_value_heads": 1}),
    "gemma3 full": ("Gemma3", GEMMA | {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    expected_model = save(tmp_path, kind, **config)
    loaded = load_model(ModelConfig(model=str(tmp_path)))
    ids = random_ids(80)
    expected = reference_logits(expected_model, ids)
    assert np.abs(expected).max() > 1, "the case must not be trivial"
    (whole,) = step(prepare(loaded), [(Sequence(ids, [3, 7, 1, 9, 4]), 80)])
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    (exact,) = step(prepare(loaded, np.float64), [(Sequence(ids, [1, 2, 3, 4, 5]), 80)])
    np.testing.assert_allclose(exact, expected, atol=1e-4)


@pytest.mark.parametrize("case", ["gqa", "gemma3", "qwen2 window"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_hidden_states_equal_those_of_transformers(case: str, backend: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    model = save(tmp_path, kind, **config)
    loaded, ids = load_model(ModelConfig(model=str(tmp_path))), random_ids(60)
    _, family = find_family(loaded.info.config, str(tmp_path))
    loaded = replace(loaded, program=family.build(family.config(loaded.info.config)))
    with torch.no_grad():
        expected = model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    runnable = prepare(loaded, backend=make_backend(BackendConfig(backend=backend, threads=1)))  # type: ignore[arg-type]
    outputs = step_outputs(runnable, [(Sequence(ids, [3, 7, 1, 9]), 60)])
    tolerance = 1e-4 if backend == "reference" else 2e-2 * np.abs(expected).max()
    np.testing.assert_allclose(outputs.rows("hidden"), expected, atol=tolerance)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    folder = tmp_path_factory.mktemp("gqa")
    return save(folder), load_model(ModelConfig(model=str(folder)))


def test_chunks_batches_and_block_tables_change_no_bit(gqa: tuple[Any, LoadedModel]) -> None:
    """A request alone in one step, and in chunks with another one beside it in blocks of any order."""
    _, loaded = gqa
    first, second = random_ids(50), random_ids(37, seed=6)
    (alone,) = step(prepare(loaded), [(Sequence(first, [1, 2, 3, 4]), 50)])
    (alone_second,) = step(prepare(loaded), [(Sequence(second, [1, 2, 3]), 37)])

    crowd = prepare(loaded)
    a, b = Sequence(first, [8, 2, 11, 5]), Sequence(second, [9, 1, 3])
    chunks_a, chunks_b = [], []
    for count_a, count_b in ((7, 20), (1, 1), (30, 3), (1, 1), (11, 12)):
        part_b, part_a = step(crowd, [(b, count_b), (a, count_a)])
        chunks_a.append(part_a)
        chunks_b.append(part_b)
    np.testing.assert_array_equal(np.concatenate(chunks_a), alone)
    np.testing.assert_array_equal(np.concatenate(chunks_b), alone_second)


def test_copied_blocks_continue_the_same(gqa: tuple[Any, LoadedModel]) -> None:
    model, loaded = gqa
    ids = random_ids(40)
    runnable = prepare(loaded)
    step(runnable, [(Sequence(ids, [1, 2, 3]), 30)])
    runnable.copy_blocks([(1, 4), (2, 5)])
    (logits,) = step(runnable, [(Sequence(ids, [4, 5, 6], computed=30), 10)])
    np.testing.assert_allclose(logits, reference_logits(model, ids)[30:], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_checkpoints(dtype: torch.dtype, tmp_path: Path) -> None:
    """As float32 they are exact; as bfloat16 only the float16 ones are rounded."""
    model = save(tmp_path, dtype=dtype)
    ids = random_ids(20)
    expected = reference_logits(model, ids)
    for choice in ("float32", "auto"):
        loaded = load_model(ModelConfig(model=str(tmp_path), dtype=choice))
        (logits,) = step(prepare(loaded), [(Sequence(ids, [1, 2]), 20)])
        rounded = choice == "auto" and dtype == torch.float16
        np.testing.assert_allclose(logits, expected, atol=0.5 if rounded else 1e-4)
        formats = {w.format for parts in loaded.weights.values() for w in parts if len(w.shape) == 2}
        assert formats == {"bfloat16" if choice == "auto" else "float32"}


def test_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    loaded = load_model(ModelConfig(model=str(tmp_path)))
    assert loaded.weights["lm_head"] is loaded.weights["embed_tokens"]


@pytest.mark.parametrize("case", ["gemma3", "mistral window", "qwen2 window"])
def test_windows_on_the_cpu_backend(case: str, tmp_path: Path) -> None:
    """Near transformers, KV being bfloat16, and the same bits however the prompt is cut."""
    kind, config = CASES[case]
    model = save(tmp_path, kind, **config)
    loaded = load_model(ModelConfig(model=str(tmp_path)))
    ids = random_ids(150)
    expected = reference_logits(model, ids)
    cpu = make_backend(BackendConfig(threads=2))
    blocks = [3, 7, 1, 9, 4, 12, 2, 11, 5, 8]
    (whole,) = step(prepare(loaded, backend=cpu), [(Sequence(ids, blocks), 150)])
    # rounding K and V to bfloat16 costs 0.01, a window that is wrong by one token 0.08 or more
    assert np.linalg.norm(whole - expected) < 0.02 * np.linalg.norm(expected)
    runnable, sequence = prepare(loaded, backend=cpu), Sequence(ids, blocks)
    parts = [step(runnable, [(sequence, count)])[0] for count in (7, 60, 1, 1, 33, 48)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
