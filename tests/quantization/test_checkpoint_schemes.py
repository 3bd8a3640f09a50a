"""AWQ, GPTQ and compressed-tensors checkpoints, written here number by number, load as the values they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import BackendConfig, ModelConfig
from octavo.exceptions import FormatError, UnsupportedModel
from octavo.model_loader import inspect_model, load_model, outline_model
from octavo.quantization.base import stack_dequantized
from tests.models.tiny import Sequence, prepare, random_ids, reference_logits, save, step
from tests.quantization.sizes import sizes

Tensors = dict[str, np.ndarray]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def codes_of(weight: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], scales (of float16) and zero points [N, K / group] near ``weight``."""
    n, k = weight.shape
    grouped = weight.reshape(n, k // group, group)
    most = 2**bits - 1
    if symmetric:
        scale = np.abs(grouped).max(-1) / (most // 2)
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = grouped.min(-1), grouped.max(-1)
        scale = (high - low) / most
        zero = np.clip(np.round(-low / scale), 1, most).astype(np.int64)
    scale = np.maximum(scale, 1e-4).astype(np.float16)
    codes = np.clip(np.round(grouped / scale[..., None].astype(np.float64)) + zero[..., None], 0, most)
    return codes.reshape(n, k).astype(np.int64), scale, zero


def values(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """The numbers that codes stand for, in float64."""
    n, k = codes.shape
    grouped = codes.reshape(n, scale.shape[1], -1) - zero[..., None]
    return (grouped * scale[..., None].astype(np.float64)).reshape(n, k)


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[R, C] -> int32 [R, C * bits / 32]; the j-th lowest bits of a word hold number order[j] of it."""
    per_word = 32 // bits
    out = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint32)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            for place in range(per_word):
                which = place if order is None else order[place]
                out[row, column] |= np.uint32(int(numbers[row, column * per_word + which]) << (place * bits))
    return out.view(np.int32)


def awq(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    codes, scale, zero = codes_of(weight, 4, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        f"{module}.qweight": words(codes.T, 4, order),
        f"{module}.qzeros": words(zero.T, 4, order),
        f"{module}.scales": np.ascontiguousarray(scale.T),
    }
    return tensors, values(codes, scale, zero)


def gptq(bits: int, symmetric: bool, offset: int) -> Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, scale, zero = codes_of(weight, bits, 64, symmetric)
        tensors = {
            f"{module}.qweight": np.ascontiguousarray(words(codes, bits).T),
            f"{module}.qzeros": words(zero.T - offset, bits),
            f"{module}.scales": np.ascontiguousarray(scale.T),
            f"{module}.g_idx": (np.arange(weight.shape[1]) // 64).astype(np.int32),
        }
        return tensors, values(codes, scale, zero)

    return write


def int8(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.round(weight / scale).astype(np.int8)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scale}, codes * scale.astype(np.float64)


def packed(bits: int) -> Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, scale, zero = codes_of(weight, bits, 32, symmetric=True)
        tensors = {
            f"{module}.weight_packed": words(codes, bits),
            f"{module}.weight_scale": scale,
            f"{module}.weight_shape": np.array(weight.shape, np.int64),
        }
        return tensors, values(codes, scale, zero)

    return write


def compressed(layout: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True} | more
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


GPTQ_V1 = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
KINDS: dict[str, tuple[dict[str, Any], Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]], str]] = {
    "awq": (AWQ_CONFIG, awq, "AWQ"),
    "gptq": (GPTQ_V1, gptq(4, True, 1), "GPTQ"),
    "gptq asymmetric": (GPTQ_V1 | {"sym": False}, gptq(4, False, 1), "GPTQ"),
    "gptq v2": (GPTQ_V1 | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, False, 0), "GPTQ"),
    "gptq 8 bit": (GPTQ_V1 | {"bits": 8}, gptq(8, True, 1), "GPTQ"),
    "gptq 8 bit asymmetric": (GPTQ_V1 | {"bits": 8, "sym": False}, gptq(8, False, 1), "GPTQ"),
    "int8 per channel": (compressed("int-quantized", 8, strategy="channel"), int8, "INT8"),
    "int4 groups": (compressed("pack-quantized", 4, strategy="group", group_size=32), packed(4), "INT4"),
    "int8 groups": (compressed("pack-quantized", 8, strategy="group", group_size=32), packed(8), "INT8"),
}


def write(folder: Path, kind: str, family: str = "Llama") -> tuple[Any, Path]:
    """A folder quantised as ``kind``, and the transformers model with the values that its weights stand for."""
    config, pack, _ = KINDS[kind]
    model = save(folder, family, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rsplit(".", 1)[-1] in LINEARS:
            parts, exact = pack(module, parameter.detach().numpy())
            del tensors[name]
            tensors |= parts
            parameter.data = torch.from_numpy(exact.astype(np.float32))
    save_file(tensors, folder / "model.safetensors")
    change(folder, quantization_config=config)
    return model, folder


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_value_survives(kind: str, tmp_path: Path) -> None:
    model, folder = write(tmp_path, kind)
    loaded = load_model(ModelConfig(model=str(folder)))
    wanted = dict(model.named_parameters())
    for layer in range(2):
        for name, modules in {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }.items():
            sources = [wanted[f"model.layers.{layer}.{module}.weight"].detach().numpy() for module in modules]
            # float32 may round scale * (q - zero) + minimum twice, where float64 rounds once
            found = stack_dequantized(loaded.weights[f"layers.{layer}.{name}"])
            np.testing.assert_allclose(found, np.concatenate(sources), rtol=1e-6, atol=1e-7)
    assert KINDS[kind][2] in loaded.info.weights_format


@pytest.mark.parametrize("kind", KINDS)
def test_outlines_are_those_of_the_loaded_weights(kind: str, tmp_path: Path) -> None:
    """Without reading them, and without the files: then a module that several parts are stacked into is one part."""
    _, folder = write(tmp_path, kind)
    config = ModelConfig(model=str(folder))
    loaded = load_model(config)
    for name, parts in loaded.outlines.items():
        found = [sizes(part) for part in loaded.weights[name]]
        if kind == "int8 per channel" and len(parts[0].shape) == 2 and name.startswith("layers."):
            found = [facts | {"scale": (facts["scale"][0], "<f2")} for facts in found]  # these do not fit float16
        assert [sizes(part) for part in parts] == found
    (folder / "model.safetensors").unlink()
    outline = outline_model(config)
    assert outline.program.weights == loaded.program.weights
    assert outline.info == loaded.info


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_logits_are_those_of_the_values(kind: str, family: str, tmp_path: Path) -> None:
    model, folder = write(tmp_path, kind, family)
    ids = random_ids(24)
    wanted = reference_logits(model, ids)
    for backend, bound in ((None, 1e-4), (CpuBackend(BackendConfig(threads=1, weights_cache=False)), 2e-2)):
        runnable = prepare(load_model(ModelConfig(model=str(folder))), backend=backend)
        (found,) = step(runnable, [(Sequence(ids, [1, 2]), 24)])
        assert np.linalg.norm(found - wanted) <= bound * np.linalg.norm(wanted)


def test_a_part_of_the_model_may_stay_plain(tmp_path: Path) -> None:
    model, folder = write(tmp_path, "awq")
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    info = inspect_model(str(folder), ModelConfig(model=str(folder)))
    assert info.weights_format == "AWQ + F32"
    linears = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    plain = sum(p.numel() for name, p in model.named_parameters()) - linears
    assert info.weight_bytes == plain * 4 + linears * (0.5 + 0.25)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ("awq", "must be an object"),
        (AWQ_CONFIG | {"bits": 3}, "3 bits"),
        (AWQ_CONFIG | {"version": "gemv"}, "gemv"),
        (AWQ_CONFIG | {"zero_point": False}, "zero_point"),
        (GPTQ_V1 | {"bits": 2}, "2 bits"),
        (GPTQ_V1 | {"group_size": "64"}, "group_size"),
        (GPTQ_V1 | {"checkpoint_format": "marlin"}, "marlin"),
        (compressed("float-quantized", 8), "float-quantized"),
        (compressed("int-quantized", 4), "4 bits"),
        (compressed("pack-quantized", 4, symmetric=False), "symmetric"),
        (compressed("pack-quantized", 4, type="float"), "float"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "config_groups"),
    ],
)
def test_what_is_not_supported_is_named(section: Any, says: str, tmp_path: Path) -> None:
    save(tmp_path, **SIZES)
    change(tmp_path, quantization_config=section)
    with pytest.raises(UnsupportedModel, match=says):
        inspect_model(str(tmp_path), ModelConfig(model=str(tmp_path)))


def broken(folder: Path, kind: str, change_one: Callable[[Tensors, str], None]) -> None:
    _, folder = write(folder, kind)
    tensors = load_file(folder / "model.safetensors")
    change_one(tensors, "model.layers.0.mlp.down_proj")
    save_file(tensors, folder / "model.safetensors")
    load_model(ModelConfig(model=str(folder))).weights["layers.0.down"]


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    def shuffle(tensors: Tensors, module: str) -> None:
        tensors[f"{module}.g_idx"] = tensors[f"{module}.g_idx"][::-1].copy()

    with pytest.raises(UnsupportedModel, match=r"down_proj.*desc_act"):
        broken(tmp_path, "gptq", shuffle)


@pytest.mark.parametrize("kind", ["awq", "gptq"])
@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_tensor_that_is_missing_or_cut_is_named(kind: str, part: str, tmp_path: Path) -> None:
    def cut(tensors: Tensors, module: str) -> None:
        tensors[f"{module}.{part}"] = tensors[f"{module}.{part}"][:-1].copy()

    def drop(tensors: Tensors, module: str) -> None:
        del tensors[f"{module}.{part}"]

    for number, damage in enumerate((cut, drop)):
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises(FormatError, match=part):
            broken(folder, kind, damage)
