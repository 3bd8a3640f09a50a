"""Groups of layers, and bytes of the KV cache."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from octavo.config import CacheConfig
from octavo.exceptions import ConfigError
from octavo.messages import KVCacheSpec, KVSpec
from tests.core.kv_parts import kv_specs


def test_a_token_takes_a_place_in_each_group_and_blocks_are_equal() -> None:
    kv = KVCacheSpec(groups=(*kv_specs([None], 100), *kv_specs([20, 20], 60)), block_size=16)
    assert (kv.bytes_per_token, kv.bytes_per_block) == (100 + 2 * 60, 1600)
    assert kv.entries_for(17) == 2 * 3
    state = KVSpec(kind="state", bytes_per_request=5000)
    assert replace(kv, groups=(*kv.groups, state)).bytes_per_block == 5000


def test_sliding_groups_have_windows_and_others_have_none() -> None:
    with pytest.raises(ValueError, match="a group of kind full has the window 20"):
        KVSpec(kind="full", window=20)
    with pytest.raises(ValueError, match="a group of kind sliding has the window None"):
        KVSpec(kind="sliding")


def test_names_of_kv_dtypes() -> None:
    names = {"auto": "auto", "bf16": "bfloat16", "bfloat16": "bfloat16", "int8": "int8"}
    names |= {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
    assert {name: CacheConfig(kv_cache_dtype=name).kv_dtype for name in names} == names  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_dtype = 'fp4': must be one of auto, bf16"):
        CacheConfig(kv_cache_dtype="fp4")  # type: ignore[arg-type]
