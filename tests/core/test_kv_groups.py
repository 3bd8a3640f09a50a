"""Blocks before sliding windows: given back, found again, and never while a step that fills them may still fail."""

from __future__ import annotations

from octavo.config import SchedulerConfig
from tests.core.checking_worker import Loop, cache_config, make_request

A, B = [3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 7]  # the first two tokens, a block, are the same


def test_blocks_before_the_window_are_free_for_others() -> None:
    loop = Loop(SchedulerConfig(max_num_seqs=1), cache_config(4), num_blocks=100, windows=(None, 8))
    loop.add(make_request("r", list(range(20)) * 2, max_tokens=41))
    usage = []
    while loop.scheduler.has_requests():
        usage.append(loop.scheduler._kv.pool.num_usable - loop.scheduler._kv.pool.num_free)
        loop.step()
    assert max(usage) <= 20 + 10, "80 tokens are 20 blocks of the full group, and the prompt has 10 of the other"
    assert usage[-1] <= 20 + 3
    loop.check_results()


def test_a_block_stays_until_the_step_that_fills_it_has_come_back() -> None:
    """B takes over A's first block while A's steps are in flight; when the first of these fails, B must start anew."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=6, long_prefill_token_threshold=4)
    loop = Loop(config, cache_config(2), num_blocks=30, depth=2, windows=(3,))
    loop.worker.failing.add("a")
    loop.add(make_request("a", A))
    loop.add(make_request("b", B))
    loop.run()
    assert loop.received["b"].facts.num_preemptions == 1
    loop.check_results()
