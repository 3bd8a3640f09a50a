"""Longest prefix first: who may overtake whom, and how often."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerConfig
from octavo.core.longest_prefix import WINDOW, LongestPrefixFirst
from octavo.core.policy import FcfsPolicy
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.exceptions import ConfigError
from octavo.messages import Tenant
from tests.core.checking_worker import Loop, cache_config, make_request

WARM = list(range(8))
COLD = [20] * 8


def make_loop(overtakes: int, policy: str = "fcfs", num_blocks: int = 100, **cache: object) -> Loop:
    config = SchedulerConfig(max_num_seqs=1, longest_prefix_first=overtakes, scheduling_policy=policy)  # type: ignore[arg-type]
    loop = Loop(config, cache_config(4, **cache), num_blocks=num_blocks)
    loop.add(make_request("warm-up", WARM, max_tokens=1))
    loop.run()
    return loop


def order(loop: Loop) -> list[str]:
    """Run all; their names in the order in which they started."""
    started = []
    while loop.scheduler.has_requests():
        plan = loop.step()
        started += [new.request_id for new in plan.new_requests] if plan is not None else []
    loop.check_results()
    return started


def add(loop: Loop, name: str, prompt: list[int], **options: object) -> None:
    loop.add(make_request(name, [*prompt, len(loop.requests)], max_tokens=1, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_the_longest_prefix_goes_first_and_equals_in_order_of_arrival(index: str) -> None:
    loop = make_loop(9, prefix_index=index)
    for name, prompt in [("a", COLD), ("b", WARM[:4]), ("c", WARM), ("d", [*COLD[:4], 1]), ("e", WARM)]:
        add(loop, name, prompt)
    found = order(loop)
    assert found[:3] == ["c", "e", "b"]
    assert found[3:] == ["a", "d"]


def test_without_the_option_order_is_the_policys() -> None:
    loop = make_loop(0)
    add(loop, "cold", COLD)
    add(loop, "warm", WARM)
    assert order(loop) == ["cold", "warm"]


@pytest.mark.parametrize("overtakes", [1, 3])
def test_nobody_is_overtaken_more_often_than_allowed(overtakes: int) -> None:
    loop = make_loop(overtakes)
    for name in ("cold", "cold too"):
        add(loop, name, [*COLD, len(name)])
    hits = [f"warm{i}" for i in range(7)]
    for name in hits:
        add(loop, name, WARM)
    assert order(loop) == [*hits[:overtakes], "cold", "cold too", *hits[overtakes:]]


def test_a_stream_of_hits_starves_nobody() -> None:
    loop = make_loop(5)
    add(loop, "cold", COLD)
    for number in range(50):
        add(loop, f"warm{number}", WARM)
        loop.step()
        if loop.received["cold"].tokens:
            break
    assert number == 5


def test_what_came_in_together_goes_one_after_the_other() -> None:
    """The first of a group brings the prefix in, the others then find it."""
    loop = make_loop(99)
    for number in range(6):
        add(loop, f"{'ab'[number % 2]}{number}", [10 + number % 2] * 8)
    assert order(loop) == ["a0", "a2", "a4", "b1", "b3", "b5"]


def test_priorities_are_not_overruled() -> None:
    loop = make_loop(9, "priority")
    add(loop, "urgent", COLD, priority=0)
    add(loop, "cold", COLD[1:], priority=1)
    add(loop, "warm", WARM, priority=1)
    assert order(loop) == ["urgent", "warm", "cold"]


def test_tenants_are_not_overruled() -> None:
    loop = make_loop(9, "fair")
    add(loop, "a cold", COLD, tenant=Tenant("a"))
    add(loop, "b warm", WARM, tenant=Tenant("b"))
    add(loop, "a warm", WARM, tenant=Tenant("a"))
    assert order(loop) == ["a warm", "b warm", "a cold"]


def test_those_who_ran_before_are_not_overtaken() -> None:
    config = SchedulerConfig(max_num_seqs=2, longest_prefix_first=9)
    loop = Loop(config, cache_config(4), num_blocks=7)  # six blocks: two requests outgrow them
    loop.add(make_request("long", COLD, max_tokens=12))
    loop.add(make_request("preempted", WARM, max_tokens=12))
    loop.step()
    loop.add(make_request("waits", WARM, max_tokens=1))
    started = order(loop)
    assert loop.received["preempted"].facts.num_preemptions > 0
    assert started[-1] == "waits"


def test_nor_are_those_that_are_not_the_first() -> None:
    cached = {"new": 0, "ran before": 1, "hit": 9}
    policy = LongestPrefixFirst(FcfsPolicy(), 9, lambda request: cached[request.request_id])
    for name in cached:
        policy.enqueue(Request(make_request(name, WARM), SOLO, limit=100, queued_time=0.0))
    _, ran_before, hit = policy
    assert policy.peek(lambda request: True) is hit
    ran_before.preempt()
    assert policy.peek(lambda request: True) is ran_before
    assert policy.peek(lambda request: request is not ran_before) is hit


def test_only_the_first_of_a_long_queue_are_looked_at() -> None:
    loop = make_loop(9)
    for number in range(WINDOW):
        add(loop, f"cold{number}", [number + 30, *COLD])
    add(loop, "warm", WARM)
    assert order(loop)[:2] == ["cold0", "warm"]


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="longest_prefix_first = -1: must be 0"):
        SchedulerConfig(longest_prefix_first=-1)
