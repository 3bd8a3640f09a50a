"""Every GGUF block type, on random bytes, against the ``gguf`` package's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.backends.cpu import _kernels
from octavo.backends.cpu.weights import part_numbers
from octavo.exceptions import FormatError, UnsupportedModel
from octavo.quantization.schemes.gguf import from_blocks, outline_of
from octavo.quantization.schemes.unquantized import from_array, to_bfloat16
from tests.quantization.sizes import sizes

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
FLOAT16_FIELDS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}


def random_blocks(type: str, rows: int, k: int) -> np.ndarray:
    """Random bytes with finite float16 scales in the places of scales."""
    rng = np.random.default_rng(7)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    raw = rng.integers(0, 256, size=(rows * k // block, size), dtype=np.uint8)
    for offset in FLOAT16_FIELDS.get(type, (0,)):
        raw[:, offset : offset + 2] = rng.normal(size=(len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("type", TYPES)
def test_dequantised_values_equal_ggml(type: str) -> None:
    raw = random_blocks(type, rows=24, k=512)
    weight = from_blocks(raw, type, (24, 512))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])
    np.testing.assert_array_equal(weight.dequantize(), expected)


@pytest.mark.parametrize("type", TYPES)
def test_an_outline_is_all_of_a_weight_but_its_numbers(type: str) -> None:
    weight, outline = from_blocks(random_blocks(type, rows=64, k=512), type, (64, 512)), outline_of(type, (64, 512))
    assert sizes(outline) == sizes(weight)
    packed = _kernels.Kernels().packed_bytes(_kernels.PartShape(*part_numbers("", outline)))
    assert packed == weight.num_bytes == outline.num_bytes


def test_greatest_scale_of_q4_0() -> None:
    raw = random_blocks("Q4_0", 1, 32)
    raw[0, :2] = np.array([60000], np.float16).view(np.uint8)
    np.testing.assert_array_equal(
        from_blocks(raw, "Q4_0", (1, 32)).dequantize(), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0)
    )


@pytest.mark.parametrize(
    ("source", "dtype", "expected"),
    [
        ("F32", "auto", "float32"),
        ("F16", "auto", "bfloat16"),
        ("BF16", "auto", "bfloat16"),
        ("F32", "bfloat16", "bfloat16"),
        ("F16", "float32", "float32"),
        ("BF16", "float32", "float32"),
    ],
)
def test_float_types_follow_dtype(source: str, dtype: str, expected: str) -> None:
    values = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": to_bfloat16(values)}[source]
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if source == "BF16" else stored.astype(np.float32)
    raw = np.ascontiguousarray(stored).view(np.uint8)
    for weight in (from_array(stored, source, dtype), from_blocks(raw, source, (4, 8), dtype)):
        assert weight.format == expected
        assert sizes(weight) == sizes(outline_of(source, (4, 8), dtype))
        if expected == "float32" or source == "BF16":
            np.testing.assert_array_equal(weight.dequantize(), exact)
        else:
            np.testing.assert_allclose(weight.dequantize(), exact, rtol=2**-8)
    vector = from_array(stored[0], source, dtype)
    assert vector.format == "float32"
    np.testing.assert_array_equal(vector.dequantize(), exact[0])


def test_bfloat16_rounds_like_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(3).integers(0, 2**32, size=20000, dtype=np.uint32)
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(to_bfloat16(values)[finite], expected[finite])
    assert (to_bfloat16(values)[~finite] == 0x7FC0).all()


def test_sizes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(FormatError, match="31"):
        from_blocks(np.zeros(34, np.uint8), "Q8_0", (1, 31))
    with pytest.raises(FormatError, match="33 bytes"):
        from_blocks(np.zeros(33, np.uint8), "Q8_0", (1, 32))
    with pytest.raises(UnsupportedModel, match="IQ2_XS"):
        from_blocks(np.zeros(33, np.uint8), "IQ2_XS", (1, 32))
    with pytest.raises(UnsupportedModel, match="matrices"):
        from_blocks(np.zeros(34, np.uint8), "Q8_0", (32,))
