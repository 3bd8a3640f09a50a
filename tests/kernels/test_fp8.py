"""fp8 KV keeps exactly the numbers of OCP's formats: every code, every edge between two, saturation."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.reference.ops import KV_ROUNDING, nearest_fp8
from octavo.config import KVDtype
from octavo.program import ProgramBuilder, Value
from octavo.quantization.base import Weight
from tests.kernels.kernel_programs import ISAS, Chunk, OpCase, cpu, step
from tests.kernels.test_attention import sizes_for

# name: mantissa bits, bias, the greatest number
FORMATS: dict[KVDtype, tuple[int, int, float]] = {"fp8_e4m3": (3, 7, 448.0), "fp8_e5m2": (2, 15, 57344.0)}
DIM = 256


def value_of(code: int, kv: KVDtype) -> float:
    """The number of a code, by the text of the specification; NaN and infinity as such."""
    mantissa_bits, bias, _ = FORMATS[kv]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (1 << mantissa_bits) - 1
    if kv == "fp8_e4m3" and code & 0x7F == 0x7F:
        return float("nan")
    if kv == "fp8_e5m2" and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def codes_of(kv: KVDtype) -> dict[int, float]:
    """Codes of finite numbers."""
    return {code: value for code in range(256) if np.isfinite(value := value_of(code, kv))}


def edges_of(kv: KVDtype) -> dict[float, float]:
    """Numbers around each middle between neighbours, and what they are rounded to."""
    codes = {code: value for code, value in codes_of(kv).items() if code < 0x80}
    edges: dict[float, float] = {}
    for code in sorted(codes)[:-1]:
        low, high = codes[code], codes[code + 1]
        middle = np.float32((low + high) / 2)
        even = low if code % 2 == 0 else high
        below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
        edges |= {float(below): low, float(middle): even, float(above): high}
    return edges


@pytest.mark.parametrize("kv", FORMATS)
def test_tables_are_the_specifications(kv: KVDtype) -> None:
    values = codes_of(kv)
    assert len(values) == {"fp8_e4m3": 254, "fp8_e5m2": 248}[kv]
    assert max(values.values()) == FORMATS[kv][2]
    smallest = min(value for value in values.values() if value > 0)
    assert smallest == {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}[kv]


@pytest.mark.parametrize("kv", FORMATS)
def test_reference_rounds_to_the_table(kv: KVDtype) -> None:
    values = np.array(list(codes_of(kv).values()))
    np.testing.assert_array_equal(nearest_fp8(values, *FORMATS[kv]), values)
    edges = edges_of(kv)
    np.testing.assert_array_equal(nearest_fp8(np.array(list(edges)), *FORMATS[kv]), list(edges.values()))
    np.testing.assert_array_equal(nearest_fp8(-np.array(list(edges)), *FORMATS[kv]), -np.array(list(edges.values())))
    most = FORMATS[kv][2]
    np.testing.assert_array_equal(nearest_fp8(np.array([2 * most, -1e30]), *FORMATS[kv]), [most, -most])


def _values_alone(b: ProgramBuilder) -> Value:
    """One token's attention to itself: its V as stored."""
    zero = b.embed(b.token_ids, "zero", DIM)
    return b.rows(
        b.attention(zero, zero, b.embed(b.token_ids, "v", DIM), layer=0, num_heads=1, num_kv_heads=1), b.logit_rows
    )


def stored_values(rows: np.ndarray, kv: KVDtype, isa: str) -> np.ndarray:
    """Rows [N, DIM] as the KV cache gives them back."""
    program = OpCase(_values_alone, DIM, 0.0).program()
    table, zeros = np.zeros((DIM, DIM), np.float32), np.zeros((DIM, DIM), np.float32)
    table[: len(rows)] = rows
    weights = {"v": (Weight("float32", table.shape, table),), "zero": (Weight("float32", zeros.shape, zeros),)}
    chunks = [Chunk([n], 0, [n + 1]) for n in range(len(rows))]
    sizes = sizes_for(kv=kv)
    return cpu(program, weights, sizes, isa=isa).run(step(chunks, sizes)).rows("logits").copy()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", FORMATS)
def test_every_code_survives(kv: KVDtype, isa: str) -> None:
    """The greatest number is among them, so that the scale is 1 and numbers are kept as they are."""
    row = np.zeros((1, DIM), np.float32)
    values = list(codes_of(kv).values())
    row[0, : len(values)] = values
    np.testing.assert_array_equal(stored_values(row, kv, isa), row)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_edges_round_to_nearest_even(sign: float, kv: KVDtype, isa: str) -> None:
    edges = edges_of(kv)
    numbers, expected = np.array(list(edges), np.float32), np.array(list(edges.values()), np.float32)
    rows = np.zeros((2, DIM), np.float32)
    rows[:, 0] = FORMATS[kv][2]  # makes the scale 1
    rounded = rows.copy()
    for row, part in enumerate(np.array_split(np.arange(len(numbers)), 2)):
        rows[row, 1 : len(part) + 1] = sign * numbers[part]
        rounded[row, 1 : len(part) + 1] = sign * expected[part]
    np.testing.assert_array_equal(stored_values(rows, kv, isa), rounded)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", FORMATS)
def test_random_heads_are_stored_as_the_reference_rounds_them(kv: KVDtype, isa: str) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((16, DIM)) * np.exp(rng.standard_normal((16, DIM)) * 4)).astype(np.float32)
    rows *= (2.0 ** rng.integers(-90, 90, (16, 1))).astype(np.float32)
    # weights, here the scale alone, are bfloat16: off by 2^-8 of each number at most
    np.testing.assert_allclose(stored_values(rows, kv, isa), KV_ROUNDING[kv](rows, DIM), rtol=2.0**-8, atol=0)
