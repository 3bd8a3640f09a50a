"""What each kind of group needs of a sequence, and the block manager of models whose layers keep nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_cache.event_log import SPEC_KINDS
from octavo.core.kv_cache.groups import GROUPS, make_groups
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.prefix_finder import Prefix
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.exceptions import ConfigError
from octavo.messages import KVSpec
from tests.core.checking_worker import make_request


@given(num_tokens=st.integers(0, 200), block_size=st.sampled_from([1, 4, 16]), window=st.integers(1, 60))
def test_a_window_needs_the_rows_of_the_tokens_in_it(num_tokens: int, block_size: int, window: int) -> None:
    (group,) = make_groups([KVSpec(kind="sliding", window=window)], block_size, ahead=1)
    first_token = max(0, num_tokens - window + 1)
    assert group.first_row(num_tokens) == first_token // block_size
    assert num_tokens // block_size - group.first_row(num_tokens) < group.most_rows
    assert group.gives_back


@pytest.mark.parametrize("kind", ["full", "latent"])
def test_full_attention_needs_all_rows_and_so_do_latents(kind: str) -> None:
    (group,) = make_groups([KVSpec(kind=kind)], 16, ahead=1)  # type: ignore[arg-type]
    assert [group.first_row(n) for n in (0, 1, 10**6)] == [0, 0, 0]
    assert group.most_rows > 10**6
    assert not group.gives_back


def test_events_have_a_word_for_each_kind() -> None:
    assert SPEC_KINDS.keys() == GROUPS.keys()


def test_kinds_without_a_strategy_are_refused() -> None:
    with pytest.raises(ConfigError, match="a KV group of kind state: must be one of full, latent, sliding"):
        KVCacheManager(9, 4, [KVSpec(), KVSpec(kind="state", bytes_per_request=8)])


def test_layers_that_keep_nothing_need_no_blocks() -> None:
    manager = KVCacheManager(2, 4, ())
    requests = [Request(make_request(name, [1] * 9), SOLO, limit=20, queued_time=0.0) for name in "ab"]
    for request in requests:
        assert manager.find_prefix(request).num_tokens == 0
        room = manager.admit(request, Prefix(), 9)
        assert room is not None
        assert room.block_ids == []
        request.start(0, 0.0)
        request.advance(9)
        manager.share(request)
    manager.check_invariants(requests)
    for request in requests:
        manager.free(request)
    assert manager.pool.num_free == 1
