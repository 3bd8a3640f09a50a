"""The same checkpoint as a HF folder and as GGUF files gives the same program and weights; bad ones are refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import ModelConfig
from octavo.exceptions import FormatError, ModelError, ModelNotFound, UnsupportedModel
from octavo.model_loader import LoadedModel, inspect_model, load_model, outline_model
from octavo.model_loader.gguf import GGUFCheckpoint
from octavo.quantization.base import Weight, owners, stack_dequantized
from tests.formats.gguf_writer import write_gguf
from tests.model_loader.checkpoints import metadata, tensors, write
from tests.models.tiny import Sequence, prepare, random_ids, reference_logits, save, step
from tests.quantization.sizes import sizes

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {"rms_norm_eps": 1e-5}),
    "llama tied": ("Llama", "llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", "qwen2", {}),
    "gemma3": ("Gemma3", "gemma3", {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16}),
}


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, str, Path, LoadedModel]:
    """A transformers model, its GGUF architecture, its folder, and the folder loaded."""
    kind, arch, config = KINDS[request.param]
    folder = tmp_path_factory.mktemp("hf")
    model = save(folder, kind, intermediate_size=64, **config)
    return model, arch, folder, load_model(ModelConfig(model=str(folder)))


def test_f32_gguf_is_the_same_model(both: tuple[Any, str, Path, LoadedModel], tmp_path: Path) -> None:
    model, arch, _, from_hf = both
    from_gguf = load_model(ModelConfig(model=str(write(tmp_path / "m.gguf", model, arch, "F32"))))
    eps = {op.attrs["eps"] for op in from_gguf.program.ops if op.kind == "rms_norm"}
    assert eps == {float(np.float32(model.config.rms_norm_eps))}  # the file holds a float32
    assert [(op.kind, op.inputs, op.outputs, op.weights) for op in from_gguf.program.ops] == [
        (op.kind, op.inputs, op.outputs, op.weights) for op in from_hf.program.ops
    ]
    for one, other in zip(from_gguf.program.ops, from_hf.program.ops, strict=True):
        assert one.kind == "rms_norm" or one.attrs == other.attrs
    assert from_gguf.program.weights == from_hf.program.weights
    for name, parts in from_hf.weights.items():
        np.testing.assert_array_equal(stack_dequantized(from_gguf.weights[name]), stack_dequantized(parts))
    assert from_gguf.info.architecture == from_hf.info.architecture
    assert from_gguf.info.max_position == from_hf.info.max_position == 256


@pytest.mark.parametrize("type", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_gguf_keeps_the_stored_values(
    both: tuple[Any, str, Path, LoadedModel], type: str, tmp_path: Path
) -> None:
    """Each parameter is what ggml's quantiser made of the HF tensors (blocks never cross rows, so order is free)."""
    model, arch, _, from_hf = both
    config = ModelConfig(model=str(write(tmp_path / "m.gguf", model, arch, type)), dtype="float32")
    loaded = load_model(config)
    kind = gguf.GGMLQuantizationType[type]
    for name, parts in from_hf.weights.items():
        values = stack_dequantized(parts)
        if values.ndim == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        np.testing.assert_array_equal(stack_dequantized(loaded.weights[name]), values)
    assert loaded.info.weights_format == type
    distinct = {id(parts): parts for parts in loaded.weights.values()}.values()
    assert loaded.info.weight_bytes == sum(w.num_bytes for parts in distinct for w in parts)
    assert inspect_model(config.model, config) == loaded.info
    for name, parts in loaded.outlines.items():
        assert [sizes(part) for part in parts] == [sizes(part) for part in loaded.weights[name]]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_a_model_without_its_weights_has_the_same_outline(
    both: tuple[Any, str, Path, LoadedModel], dtype: Any, tmp_path: Path
) -> None:
    model, arch, folder, _ = both
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    whole = ModelConfig(model=str(folder), dtype=dtype)
    outline = outline_model(dataclasses.replace(whole, model=str(tmp_path)))
    assert outline.info == load_model(whole).info
    file = write(tmp_path / "m.gguf", model, arch, "Q4_1")
    whole = ModelConfig(model=str(file), dtype=dtype)
    loaded = load_model(whole)
    os.truncate(file, gguf.GGUFReader(file).data_offset)
    outline = outline_model(whole)
    assert outline.info == loaded.info
    for name, parts in outline.weights.items():
        assert [sizes(part) for part in parts] == [sizes(part) for part in loaded.outlines[name]]
    with pytest.raises(FormatError, match=r"leave the file|data ends"):
        load_model(whole)


def test_rope_factors_of_llama3(tmp_path: Path) -> None:
    """GGUF files of Llama 3.1 hold HF's rope scaling as a tensor of divisors."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = save(tmp_path, "Llama", rope_parameters=scaling)
    plain = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 7
    file = write_gguf(
        tmp_path / "m.gguf",
        metadata(model.config, "llama"),
        tensors(model, "llama", "F32") | {"rope_freqs.weight": ((4,), "F32", factors.tobytes())},
    )
    loaded = load_model(ModelConfig(model=str(file)))
    ids = random_ids(60)
    (logits,) = step(prepare(loaded), [(Sequence(ids, [1, 2, 3, 4]), 60)])
    np.testing.assert_allclose(logits, reference_logits(model, ids), atol=1e-4)
    os.truncate(file, gguf.GGUFReader(file).data_offset)
    outline = outline_model(ModelConfig(model=str(file)))  # of which nothing depends on the divisors
    assert outline.info.weight_bytes == loaded.info.weight_bytes


def test_gguf_scaling_keys(tmp_path: Path) -> None:
    model = save(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    loaded = load_model(ModelConfig(model=str(write(tmp_path / "m.gguf", model, "llama", "F32", extra))))
    ids = random_ids(30)
    (logits,) = step(prepare(loaded), [(Sequence(ids, [1, 2]), 30)])
    np.testing.assert_allclose(logits, reference_logits(model, ids), atol=1e-4)


def windows(loaded: LoadedModel) -> list[int | None]:
    return [op.attrs["window"] for op in loaded.program.ops if op.kind == "attention"]


def test_which_layers_slide(tmp_path: Path) -> None:
    """As transformers 4 and 5 write it, and as GGUF files do."""
    model = save(tmp_path, "Gemma3", num_hidden_layers=4, head_dim=16, sliding_window=40, sliding_window_pattern=2)
    config = ModelConfig(model=str(tmp_path))
    assert windows(load_model(config)) == [40, None, 40, None]
    edit_config(tmp_path, layer_types=None, sliding_window_pattern=3)
    assert windows(load_model(config)) == [40, 40, None, 40]
    for value, expected in (
        (None, [40] * 4),
        (2, [40, None, 40, None]),
        ([True, False, False, True], [40, None, None, 40]),
    ):
        extra = {} if value is None else {"gemma3.attention.sliding_window_pattern": value}
        file = write(tmp_path / "m.gguf", model, "gemma3", "F32", extra)
        assert windows(load_model(ModelConfig(model=str(file)))) == expected
    edit_config(tmp_path, layer_types=["sliding_attention"] * 3)
    with pytest.raises(FormatError, match="3 types of 4 layers"):
        load_model(config)
    edit_config(tmp_path, layer_types=["chunked_attention"] * 4)
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        load_model(config)


def test_rope_of_gemma_as_transformers_4_writes_it(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    save(tmp_path, "Gemma3", head_dim=16, layer_types=["full_attention", "sliding_attention"], rope_parameters=rope)
    new = load_model(ModelConfig(model=str(tmp_path))).program
    edit_config(
        tmp_path,
        rope_parameters=None,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert load_model(ModelConfig(model=str(tmp_path))).program == new


@pytest.mark.parametrize(
    "changes", [{"attn_logit_softcapping": 50.0}, {"final_logit_softcapping": 30.0}, {"attention_bias": True}]
)
def test_gemma_that_octavo_lacks(changes: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, "Gemma3", head_dim=16)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        inspect_model(str(tmp_path), ModelConfig())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedModel, "MambaForCausalLM"),
        ({"architectures": None}, FormatError, "architectures"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModel, "longrope"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModel, "awq"),
        ({"num_hidden_layers": 10**9}, ModelError, "1000000000 layers"),
        ({"num_hidden_layers": 3}, ModelError, "missing"),
        ({"num_hidden_layers": 1}, ModelError, "does not use"),
        ({"num_hidden_layers": "2"}, FormatError, "num_hidden_layers"),
        ({"num_attention_heads": 0}, FormatError, "num_attention_heads"),
        ({"num_key_value_heads": 3}, FormatError, "num_key_value_heads"),
        ({"head_dim": -8}, FormatError, "head_dim"),
        ({"intermediate_size": 64}, ModelError, r"gate_proj.weight \[48, 32\]"),
        ({"vocab_size": 97}, ModelError, r"embed_tokens.weight \[96, 32\]"),
        ({"rms_norm_eps": None, "hidden_size": None}, FormatError, "hidden_size"),
        ({"attention_bias": True}, ModelError, "missing"),
        ({"rope_parameters": {"rope_theta": 0.0}}, FormatError, "rope_theta"),
    ],
)
def test_config_that_does_not_fit(folder: Path, changes: dict[str, Any], error: type, message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(error, match=message) as caught:
        inspect_model(str(folder), ModelConfig())
    assert str(folder) in str(caught.value)


def test_leftover_tensor_is_named_and_known_caches_are_ignored(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    cached = state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(cached, folder / "model.safetensors")
    inspect_model(str(folder), ModelConfig())
    save_file(state | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="q_norm"):
        inspect_model(str(folder), ModelConfig())


def test_head_saved_beside_a_tied_embedding_is_not_used(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"lm_head.weight": torch.zeros(96, 32)}, tmp_path / "model.safetensors")
    loaded = load_model(ModelConfig(model=str(tmp_path)))
    assert loaded.weights["lm_head"] is loaded.weights["embed_tokens"]


def test_integer_tensor_is_refused(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.int32)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="I32"):
        load_model(ModelConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModel, "mamba"),
        ({"llama.block_count": 100000}, ModelError, "100000 layers"),
        ({"llama.block_count": "two"}, FormatError, "llama.block_count"),
        ({"llama.attention.head_count": 0}, FormatError, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": [2, 2]}, FormatError, "llama.attention.head_count_kv"),
        ({"llama.attention.head_count_kv": 3}, FormatError, "num_key_value_heads"),
        ({"llama.embedding_length": 64}, ModelError, "do not make up"),
        ({"llama.rope.dimension_count": 7}, FormatError, "rope_theta"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, UnsupportedModel, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, FormatError, "llama.rope.scaling.factor"),
        ({"llama.attention.key_length": 0}, FormatError, "head_dim"),
    ],
)
def test_gguf_metadata_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], error: type, message: str) -> None:
    file = write(tmp_path / "m.gguf", save(tmp_path), "llama", "F32", changes)
    with pytest.raises(error, match=message) as caught:
        load_model(ModelConfig(model=str(file)))
    assert str(file) in str(caught.value)


def test_absent_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="absent"):
        load_model(ModelConfig(model=str(tmp_path / "absent")))


def test_tensors_are_read_when_asked_for_and_until_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "m.gguf", save(tmp_path, tie_word_embeddings=True), "llama", "F16")
    reads: list[str] = []
    load = GGUFCheckpoint.load

    def counted(self: GGUFCheckpoint, name: str, dtype: Any) -> Weight:
        reads.append(name)
        return load(self, name, dtype)

    monkeypatch.setattr(GGUFCheckpoint, "load", counted)
    weights = load_model(ModelConfig(model=str(file))).weights
    assert "lm_head" in weights
    assert "absent" not in weights
    assert owners(weights)["lm_head"] == "embed_tokens"
    assert len(weights) == len(list(weights))
    assert reads == []
    first = weights["lm_head"]
    assert weights["embed_tokens"] is first
    assert reads == ["model.embed_tokens.weight"]
    weights.release("lm_head")
    again = weights["embed_tokens"]
    assert again is not first
    np.testing.assert_array_equal(stack_dequantized(again), stack_dequantized(first))


def test_a_model_is_parsed_once_unless_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path)
    file = write(tmp_path / "m.gguf", model, "llama", "F32")
    config, opened = ModelConfig(model=str(file)), []
    init = GGUFCheckpoint.__init__

    def counted(self: GGUFCheckpoint, path: str, **how: bool) -> None:
        opened.append(path)
        init(self, path, **how)

    monkeypatch.setattr(GGUFCheckpoint, "__init__", counted)
    assert inspect_model(str(file), config) == load_model(config).info
    assert len(opened) == 1
    inspect_model(str(file), config)
    write(file, model, "llama", "F16")
    assert load_model(config).info.weights_format == "F16"
    assert load_model(config).info.weights_format == "F16"  # what was kept is used once


def test_the_identity_says_whether_the_files_are_the_same(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", save(tmp_path), "llama", "F32")
    config = ModelConfig(model=str(file))
    before = load_model(config).weights.identity()
    assert load_model(config).weights.identity() == before != ""
    assert load_model(dataclasses.replace(config, dtype="bfloat16")).weights.identity() != before
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=times)
    weights = load_model(config).weights
    assert weights.identity() not in ("", before)
    file.unlink()
    assert weights.identity() == ""
    folder = load_model(ModelConfig(model=str(tmp_path))).weights
    assert {Path(source).name for source in folder.sources} == {"config.json", "model.safetensors"}
