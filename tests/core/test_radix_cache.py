"""Prefix hits that end within a block: what is copied, from whom, and when not."""

from __future__ import annotations

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.kv_cache.hash_index import HashIndex
from octavo.core.kv_cache.manager import NO_ROOM_NEEDED, KVCacheManager
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.exceptions import ConfigError
from octavo.messages import BlocksEvicted, BlocksRestored, EvictPrefixes, RestorePrefix
from tests.core.checking_worker import Loop, cache_config, make_request
from tests.core.kv_parts import host_tier, kv_specs

PROMPT = list(range(12))
OTHER = 20  # a token that is nowhere in PROMPT


def make_loop(num_blocks: int = 40, **options: object) -> Loop:
    cache = cache_config(4, prefix_index="radix")
    return Loop(SchedulerConfig(), cache, num_blocks=num_blocks, **options)  # type: ignore[arg-type]


def cached(loop: Loop, name: str, prompt: list[int], *, max_tokens: int = 1, salt: str | None = None) -> int:
    """Run one request; how many tokens it found."""
    loop.add(make_request(name, prompt, max_tokens=max_tokens, salt=salt))
    loop.run()
    loop.check_results()
    return loop.received[name].facts.num_cached_tokens


@pytest.mark.parametrize("place", range(12))
def test_a_hit_ends_where_sequences_part(place: int) -> None:
    loop = make_loop()
    assert cached(loop, "first", PROMPT) == 0
    assert cached(loop, "second", [*PROMPT[:place], OTHER, OTHER]) == place
    assert cached(loop, "salted", [*PROMPT[:place], OTHER, OTHER], salt="a") == 0


def test_of_several_blocks_the_most_similar_is_copied() -> None:
    loop = make_loop()
    for number, tail in enumerate([[1, 2, 3, 4], [1, 2, 9, 9], [1, 7, 3, 4], [2, 2, 3, 4]]):
        cached(loop, f"r{number}", [*PROMPT[:4], *tail])
    for number, (tail, expected) in enumerate(
        [([1, 2, 3, 5], 7), ([1, 2, 4, 4], 6), ([1, 7, 3, 3], 7), ([2, 3, 3, 3], 5), ([3, 3, 3, 3], 4)]
    ):
        assert cached(loop, f"s{number}", [*PROMPT[:4], *tail]) == expected


def test_block_aligned_prompt_three_times_then_one_longer() -> None:
    loop = make_loop()
    assert [cached(loop, f"same{i}", PROMPT[:8]) for i in range(3)] == [0, 7, 7]
    assert cached(loop, "longer", PROMPT[:9]) == 8


def test_a_conversation_goes_on_from_its_last_token_computed() -> None:
    loop = make_loop()
    prompt = PROMPT[:5]
    for turn in range(4):
        found = cached(loop, f"turn{turn}", prompt, max_tokens=3)
        assert found == (len(prompt) - 3 if turn else 0)  # the last token sampled was not computed, two are new
        prompt = [*prompt, *loop.received[f"turn{turn}"].tokens, OTHER, OTHER]


def test_only_what_has_come_back_is_copied() -> None:
    loop = make_loop()
    loop.add(make_request("first", PROMPT, max_tokens=1))
    loop.add(make_request("same step", [*PROMPT[:10], OTHER], max_tokens=1))
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"first": 12, "same step": 3}
    assert plan.block_copies == []
    assert cached(loop, "next", [*PROMPT[:10], OTHER, 1]) == 11


def test_what_a_step_copies_stays_until_it_is_planned() -> None:
    """The pool has room for the copy and no more, so the second request must wait."""
    loop = make_loop(num_blocks=5)
    cached(loop, "first", PROMPT)
    for name in ("second", "third"):
        loop.add(make_request(name, [*PROMPT[:10], OTHER], max_tokens=1))
    plan = loop.step()
    assert plan is not None
    assert [len(plan.new_requests), len(plan.block_copies)] == [1, 1]
    loop.run()
    loop.check_results()


def test_without_room_for_a_copy_the_block_itself_is_taken() -> None:
    loop = make_loop(num_blocks=4)
    cached(loop, "first", PROMPT)
    loop.add(make_request("second", [*PROMPT[:10], OTHER], max_tokens=1))
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"second": 1}
    assert plan.block_copies == []
    loop.run()
    loop.check_results()


def test_a_partly_filled_block_makes_room_for_one_that_holds_more() -> None:
    loop = make_loop()
    pool = loop.scheduler._kv.pool
    cached(loop, "short", PROMPT[:6])
    (short,) = [block for block in pool.blocks if block.is_cached and block.key is None]
    assert cached(loop, "long", PROMPT) == 6
    assert not short.is_cached
    assert next(iter(pool._free)) is short
    assert len(pool.index) == 3


def test_a_prefix_that_a_twin_has_named_lives_as_long_as_what_continues_it() -> None:
    """Both compute the prefix at once, so what continues one's stands behind blocks of the other, which ends first."""
    loop = make_loop(num_blocks=9)
    for name, tail, count in (("goes on", [2], 6), ("ends first", [1], 1)):
        loop.add(make_request(name, [*PROMPT[:8], *tail], max_tokens=count))
    loop.scheduler._longest_chunk = 4  # so that the second one computes its second block beside the first one
    loop.run()
    assert cached(loop, "other", [OTHER] * 19) == 0  # of eight blocks these three are left
    assert cached(loop, "again", [*PROMPT[:8], 2, *loop.received["goes on"].tokens[:3], OTHER]) == 12


def test_a_fork_that_writes_into_a_cached_block_takes_it_out_of_the_tree() -> None:
    manager = KVCacheManager(9, 4, prefix_index="radix")
    parent = Request(make_request("parent", PROMPT[:7]), SOLO, limit=100, queued_time=0.0)
    assert manager.admit(parent, manager.find_prefix(parent), 7) is not None
    parent.start(0, 0.0)
    parent.advance(7)
    manager.share(parent)
    parent.num_confirmed_tokens = 7
    child = parent.fork(make_request("child", [0]), SOLO, limit=100)
    child.token_ids = [*PROMPT[:5], OTHER]
    manager.fork(parent, child, 5)
    child.start(5, 0.0)
    manager.free(parent)
    same = Request(make_request("same", PROMPT[:8]), SOLO, limit=100, queued_time=0.0)
    assert manager.find_prefix(same).num_tokens == 7
    assert manager.extend(child, 1) == NO_ROOM_NEEDED  # in place, over the parent's sixth token
    assert manager.find_prefix(same).num_tokens == 4


def test_evicting_everything_leaves_no_partly_filled_block() -> None:
    loop = make_loop()
    for name, prompt in (("short", [OTHER] * 3), ("long", PROMPT)):
        cached(loop, name, prompt)
    assert loop.scheduler.ask(EvictPrefixes()).answer == BlocksEvicted(4)
    assert len(loop.scheduler._kv.pool.index) == 0
    assert cached(loop, "again", PROMPT) == 0


def test_a_prefix_restored_from_a_tier_is_found_token_by_token() -> None:
    loop = make_loop(tiers=host_tier(40, swaps=False))
    cached(loop, "first", PROMPT)
    for number in range(4):
        cached(loop, f"flood{number}", [OTHER + number] * 40)
    assert loop.scheduler.ask(RestorePrefix(prompt_token_ids=[*PROMPT, OTHER])).answer == BlocksRestored(3)
    loop.run()
    found = cached(loop, "again", [*PROMPT[:10], OTHER])
    assert (found, loop.received["again"].facts.num_external_tokens) == (10, 0)


def test_windowed_models_find_blocks_by_hash() -> None:
    manager = KVCacheManager(9, 4, kv_specs([None, 8]), enable_prefix_caching=True, prefix_index="radix")
    assert isinstance(manager.index, HashIndex)


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="prefix_index = 'trie': must be hash or radix"):
        CacheConfig(prefix_index="trie")  # type: ignore[arg-type]
