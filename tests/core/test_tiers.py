"""What requests are told, and what they need not compute again, when tiers stand behind the pool."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerConfig
from octavo.core.request import RequestStatus
from tests.core.checking_worker import Loop, cache_config, make_request
from tests.core.kv_parts import host_tier

PROMPT = list(range(1, 18))  # four blocks of 4 and one token


def loop_of(num_blocks: int, *, caching: bool, swaps: bool, max_num_seqs: int = 4) -> Loop:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    cache = cache_config(4, enable_prefix_caching=caching)
    return Loop(config, cache, num_blocks=num_blocks, max_model_len=60, tiers=host_tier(40, swaps=swaps))


@pytest.mark.parametrize(("losing", "cached"), [(0, 16), (2, 0)])
def test_loads_that_fail_are_not_told_as_cached(losing: int, cached: int) -> None:
    loop = loop_of(8, caching=True, swaps=False)
    for name, prompt in (("first", PROMPT), ("other", [20, *PROMPT, *PROMPT[:8]])):  # the second one takes the pool
        loop.add(make_request(name, prompt, max_tokens=1))
        loop.run()
    loop.worker.losing = losing
    loop.add(make_request("again", PROMPT, max_tokens=2))
    loop.run()
    loop.check_results()
    use = loop.received["again"].facts
    assert (use.num_cached_tokens, use.num_external_tokens) == (cached, cached)


def test_samples_that_wait_are_swapped_out() -> None:
    """Without a place to run, they give their blocks to the two that run, and load them later."""
    computed = {}
    for swaps in (False, True):
        loop = loop_of(11, caching=False, swaps=swaps, max_num_seqs=2)
        loop.add(make_request("r", PROMPT, n=4, max_tokens=12))
        computed[swaps], swapped = 0, set()
        while loop.scheduler.has_requests() or loop.in_flight:
            plan = loop.step()
            computed[swaps] += plan.total_num_scheduled_tokens if plan is not None else 0
            waiting = [one for one in loop.scheduler._book.requests.values() if one.status is RequestStatus.WAITING]
            swapped |= {one.request_id for one in waiting if loop.scheduler._kv.tiers.swaps.of(one)}
        loop.check_results()
        assert swapped == ({"r.2", "r.3"} if swaps else set())
    assert computed[True] < computed[False]
