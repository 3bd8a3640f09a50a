"""Names of blocks (A15), and what a prefix hit may cover (A16)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from octavo.config import SchedulerConfig
from octavo.core.kv_cache.hashing import hash_block
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.prefix_finder import Prefix
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.messages import FinishReason, RequestFault, ResetCache
from tests.core.checking_worker import Loop, cache_config, make_request

TOKENS = [1, 2, 3, 4]


def test_names_differ_in_every_part() -> None:
    parent = hash_block(None, TOKENS)
    keys = [
        (None, TOKENS, ()),
        (parent, TOKENS, ()),
        (None, [1, 2, 3, 5], ()),
        (None, [1, 2, 34], ()),
        (None, [12, 3, 4], ()),
        (None, TOKENS, (("cache_salt", "X"),)),
        (None, TOKENS, (("adapter", "X"),)),  # A15: the same text in another namespace
        (None, TOKENS, (("adapter", b"X"),)),
        (None, TOKENS, (("adapter", "X"), ("cache_salt", "X"))),
        (None, TOKENS, (("adapter", "Xcache_salt"),)),
        (None, TOKENS, (("media", "X"),)),
        (None, TOKENS, (("cache_salt", ""),)),
    ]
    assert len({hash_block(*key) for key in keys}) == len(keys)


def test_order_of_extras_does_not_matter() -> None:
    one, other = ("adapter", "X"), ("cache_salt", "Y")
    assert hash_block(None, TOKENS, [one, other]) == hash_block(None, TOKENS, [other, one])


def test_names_are_the_same_in_every_process() -> None:
    code = (
        "from octavo.core.kv_cache.hashing import hash_block;"
        "print(hash_block(hash_block(None, [1, 2, 3, 4], [('cache_salt', 'X')]), [5, 6, 7, 8]).hex())"
    )
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "c12b952f3c30d78966cd184846961077b0b34121e2e0ba897266bec8633b5063"


def request(request_id: str, prompt: list[int], **options: object) -> Request:
    return Request(make_request(request_id, prompt, **options), SOLO, limit=1000, queued_time=0.0)


def fill(manager: KVCacheManager, req: Request) -> int:
    """Compute the whole prompt; number of tokens found in the cache."""
    prefix = manager.find_prefix(req)
    cached = prefix.num_tokens
    req.start(cached, 0.0)
    assert manager.admit(req, prefix, req.num_tokens - cached) is not None
    req.advance(req.num_tokens - cached)
    manager.share(req)
    return cached


def done(manager: KVCacheManager, req: Request) -> None:
    """The result of its last step is in, and it ends."""
    req.num_confirmed_tokens = req.num_computed_tokens
    manager.free(req)
    req.finish()


@pytest.mark.parametrize("salts", [(None, "X"), ("X", None), ("X", "Y")])
def test_no_hit_across_salts(salts: tuple[str | None, str | None]) -> None:
    manager = KVCacheManager(20, 4)
    assert fill(manager, request("a", list(range(12)), salt=salts[0])) == 0
    assert fill(manager, request("b", list(range(12)), salt=salts[1])) == 0
    assert fill(manager, request("c", list(range(12)), salt=salts[0])) == 8


def test_block_aligned_prompt_three_times_then_one_longer_then_after_an_eviction() -> None:
    loop = Loop(SchedulerConfig(), cache_config(4), num_blocks=6)
    prompt = [7, 3, 9, 1, 4, 4, 2, 8]
    for number in range(3):
        loop.add(make_request(f"same{number}", prompt, max_tokens=1))
        loop.run()
    loop.add(make_request("longer", [*prompt, 5], max_tokens=1))
    loop.run()
    cached = {key: received.facts.num_cached_tokens for key, received in loop.received.items()}
    assert cached == {"same0": 0, "same1": 4, "same2": 4, "longer": 8}  # a hit leaves the last token to compute

    loop.add(
        make_request("other", list(range(16)), max_tokens=1)
    )  # 4 of 5 blocks: keeps only the oldest prefix, if any
    loop.run()
    loop.add(make_request("again", prompt, max_tokens=1))
    loop.run()
    loop.check_results()
    assert loop.received["again"].facts.num_cached_tokens == 4  # tails are reused before heads


def test_recycled_block_loses_its_name() -> None:
    manager = KVCacheManager(3, 4)
    first = request("a", [1] * 8)
    fill(manager, first)
    done(manager, first)
    second = request("b", [2] * 8)
    fill(manager, second)
    assert manager.find_prefix(request("c", [1] * 9)).num_tokens == 0
    done(manager, second)
    manager.check_invariants([])


def test_equal_blocks_computed_at_once_stay_apart() -> None:
    manager = KVCacheManager(20, 4)
    one, two = request("a", list(range(8))), request("b", list(range(8)))
    for req in (one, two):  # both looked the prefix up before either had computed it
        req.start(0, 0.0)
        manager.admit(req, Prefix(), 8)
        req.advance(8)
    for req in (one, two):
        manager.share(req)
    assert not set(manager.block_ids(one)) & set(manager.block_ids(two))
    done(manager, one)
    manager.check_invariants([two])
    assert fill(manager, request("c", list(range(9)))) == 8
    done(manager, two)


def test_blocks_of_a_broken_request_are_not_shared() -> None:
    loop = Loop(SchedulerConfig(), cache_config(4), num_blocks=20)
    loop.worker.failing.add("broken")
    for request_id in ("broken", "next"):
        loop.add(make_request(request_id, list(range(12)), max_tokens=2))
        loop.run()
    assert loop.received["broken"].outputs[-1].error == RequestFault("broken")
    assert loop.received["next"].facts.num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_those_who_took_over_blocks_of_a_broken_request_start_again(depth: int) -> None:
    loop = Loop(SchedulerConfig(max_num_batched_tokens=64), cache_config(4), num_blocks=60, depth=depth)
    loop.worker.failing.add("broken")
    for request_id in ("broken", "same step", "same step too"):
        loop.add(make_request(request_id, [*range(12), len(request_id)]))
    loop.step()
    loop.add(make_request("later", list(range(15))))
    loop.run()
    loop.check_results()
    assert loop.received["broken"].finish_reason is FinishReason.ERROR
    assert {key: received.facts.num_preemptions for key, received in loop.received.items()} == {
        "broken": 0,
        "same step": 1,
        "same step too": 1,
        "later": 0,
    }


def test_a_block_whose_step_is_under_way_loses_its_name_with_its_request() -> None:
    loop = Loop(SchedulerConfig(), cache_config(4), num_blocks=60)
    loop.add(make_request("a", list(range(12))))
    loop.scheduler.schedule()
    assert len(loop.scheduler._kv.index) == 3
    loop.abort(["a"])
    assert len(loop.scheduler._kv.index) == 0


def test_prompt_logprobs_may_take_several_passes_so_their_blocks_are_shared_later() -> None:
    loop = Loop(SchedulerConfig(), cache_config(4), num_blocks=60)
    loop.add(make_request("owing", list(range(12)), prompt_logprobs=0))
    loop.add(make_request("same step", list(range(12))))
    loop.step()
    loop.add(make_request("next step", list(range(12))))
    loop.run()
    loop.check_results()
    cached = {key: received.facts.num_cached_tokens for key, received in loop.received.items()}
    assert cached == {"owing": 0, "same step": 0, "next step": 8}


def test_reset_forgets_prefixes_of_running_requests_too() -> None:
    loop = Loop(SchedulerConfig(), cache_config(4), num_blocks=40)
    loop.add(make_request("running", list(range(12)), max_tokens=12))
    loop.step()
    loop.step()
    loop.scheduler.ask(ResetCache())
    loop.run()
    assert len(loop.scheduler._kv.index) == 0
    for request_id, cached in (("next", 0), ("third", 8)):
        loop.add(make_request(request_id, list(range(12)), max_tokens=1))
        loop.run()
        assert loop.received[request_id].facts.num_cached_tokens == cached


def test_same_prefix_in_one_step_is_computed_once() -> None:
    loop = Loop(SchedulerConfig(), cache_config(4), num_blocks=40)
    for number in range(4):
        loop.add(make_request(f"r{number}", [*range(12), number], max_tokens=3))
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"r0": 13, "r1": 1, "r2": 1, "r3": 1}
    loop.run()
    loop.check_results()


def test_prompt_logprobs_need_every_position() -> None:
    loop = Loop(SchedulerConfig(max_num_batched_tokens=64), cache_config(4), num_blocks=40)
    for request_id, logprobs in (("plain", None), ("first", 0), ("second", 0)):
        loop.add(make_request(request_id, list(range(12)), max_tokens=2, prompt_logprobs=logprobs))
        loop.run()
    loop.check_results()
    assert len(loop.received["second"].prompt_logprobs) == 11
    assert loop.received["second"].facts.num_cached_tokens == 0


def test_hits_are_counted_in_tokens_and_off_means_off() -> None:
    for enabled in (True, False):
        loop = Loop(SchedulerConfig(), cache_config(4, enable_prefix_caching=enabled), num_blocks=40)
        totals = [0, 0]
        for number in range(2):
            loop.add(make_request(f"r{number}", list(range(10)), max_tokens=1))
            loop.scheduler.schedule()
            stats = loop.scheduler.stats()
            totals[0] += stats.prefix_cache_queries_delta
            totals[1] += stats.prefix_cache_hits_delta
        assert totals == ([20, 8] if enabled else [0, 0])
