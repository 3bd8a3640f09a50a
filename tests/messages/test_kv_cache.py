"""Bytes of the KV cache, scales included."""

from __future__ import annotations

import pytest

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import BackendConfig, CacheConfig
from octavo.exceptions import ConfigError
from octavo.messages import KVCacheSpec


def test_bytes_count_numbers_and_scales_of_keys_and_values() -> None:
    shape = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "block_size": 16}
    backend = CpuBackend(BackendConfig(threads=1))
    sizes = {}
    for dtype in ("auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"):
        element, scale = backend.kv_element_size(dtype), backend.kv_scale_size(dtype)  # type: ignore[arg-type]
        sizes[dtype] = KVCacheSpec(**shape, element_size=element, scale_size=scale)
    assert sizes["auto"] == sizes["bfloat16"]
    assert sizes["bfloat16"].bytes_per_token == 2 * 30 * 3 * 128
    assert sizes["int8"].bytes_per_token == 2 * 30 * 3 * (64 + 4)
    assert sizes["int8"].bytes_per_block == 16 * sizes["int8"].bytes_per_token
    assert sizes["int8"] == sizes["fp8_e4m3"] == sizes["fp8_e5m2"]


def test_names_of_kv_dtypes() -> None:
    names = {"auto": "auto", "bf16": "bfloat16", "bfloat16": "bfloat16", "int8": "int8"}
    names |= {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
    assert {name: CacheConfig(kv_cache_dtype=name).kv_dtype for name in names} == names  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_dtype = 'fp4': must be one of auto, bf16"):
        CacheConfig(kv_cache_dtype="fp4")  # type: ignore[arg-type]
