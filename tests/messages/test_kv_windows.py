"""Blocks that a sequence holds at once, with and without windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import FULL, KVSpec, blocks_at_once, max_tokens_that_fit
from tests.core.kv_parts import kv_specs

GROUPS = st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=4).map(kv_specs)


@given(
    length=st.integers(0, 200),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 60),
    ahead=st.integers(1, 80),
    start=st.integers(0, 200),
)
def test_no_window_needs_more(length: int, block_size: int, window: int, ahead: int, start: int) -> None:
    """Rows from the first one that the oldest unconfirmed token sees, to the one of the last planned token."""
    confirmed, end = min(start, length), min(start + ahead, length)
    rows = -(-end // block_size) - max(0, confirmed - window + 1) // block_size
    assert rows <= blocks_at_once(length, block_size, kv_specs([window]), ahead)


def test_some_place_needs_as_many() -> None:
    for window, ahead in ((1, 1), (1, 5), (20, 1), (33, 16), (512, 256)):
        most = max(-(-(end + ahead) // 16) - (end - window + 1) // 16 for end in range(window, window + 16))
        assert blocks_at_once(10**6, 16, kv_specs([window]), ahead) == most


@given(num_blocks=st.integers(0, 90), block_size=st.sampled_from([1, 4, 16]), groups=GROUPS, ahead=st.integers(1, 80))
def test_the_longest_that_fits(num_blocks: int, block_size: int, groups: tuple[KVSpec, ...], ahead: int) -> None:
    longest = max_tokens_that_fit(num_blocks, block_size, groups, ahead)
    assert blocks_at_once(longest, block_size, groups, ahead) <= max(0, num_blocks - 1)
    if longest < 2**26:
        assert blocks_at_once(longest + 1, block_size, groups, ahead) > max(0, num_blocks - 1)
    else:
        assert FULL not in groups


def test_gemma() -> None:
    """Gemma 3 270M: 3 full layers, 15 with a window of 512, in blocks of three layers; steps of 256 tokens."""
    groups = kv_specs([512, 512, 512, 512, 512, None])
    assert blocks_at_once(32768, 16, groups, 256) == 2048 + 5 * 49
    assert max_tokens_that_fit(2048 + 5 * 49 + 1, 16, groups, 256) == 32768
    assert max_tokens_that_fit(2048 + 5 * 49, 16, groups, 256) == 32752
