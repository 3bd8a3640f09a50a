"""The priority policy: who goes first, who gives way, and who must not."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.exceptions import ConfigError
from octavo.messages import EngineCoreRequest, SchedulerOutput, Tenant
from tests.core.checking_worker import Loop, cache_config, make_request


def make_loop(num_blocks: int = 100, **changes: object) -> Loop:
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "scheduling_policy": "priority", **changes}
    return Loop(SchedulerConfig(**fields), cache_config(4), num_blocks=num_blocks)


def aged(request: EngineCoreRequest, arrival_time: float) -> EngineCoreRequest:
    return msgspec.structs.replace(request, arrival_time=arrival_time)


def step(loop: Loop) -> SchedulerOutput:
    plan = loop.step()
    assert plan is not None
    return plan


def finish(loop: Loop) -> None:
    loop.run()
    loop.check_results()


def test_lower_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    loop = make_loop(max_num_seqs=1)
    for name, priority in [("b", 1), ("a", 0), ("c", 1), ("negative", -3)]:
        loop.add(make_request(name, [1, 2], priority=priority, max_tokens=1))
    assert [list(step(loop).num_scheduled_tokens) for _ in range(4)] == [["negative"], ["a"], ["b"], ["c"]]
    finish(loop)


def test_an_urgent_request_takes_the_place_of_the_least_urgent() -> None:
    loop = make_loop(max_num_seqs=2)
    loop.add(make_request("low", [1, 2], priority=2, max_tokens=5))
    loop.add(make_request("middle", [3, 4], priority=1, max_tokens=5))
    step(loop)
    loop.add(make_request("equal", [7, 8], priority=2, max_tokens=2))
    loop.add(make_request("urgent", [5, 6], priority=0, max_tokens=2))
    plan = step(loop)
    assert plan.num_scheduled_tokens == {"urgent": 2, "middle": 1}
    assert plan.finished_request_ids == ["low"]
    finish(loop)
    assert loop.received["low"].facts.num_preemptions == 1
    assert loop.received["equal"].facts.num_preemptions == 0


def test_an_urgent_request_takes_blocks() -> None:
    loop = make_loop(num_blocks=6, max_num_batched_tokens=64)  # five of them usable
    loop.add(make_request("low", [1] * 9, priority=1, max_tokens=5))
    step(loop)
    loop.add(make_request("urgent", [2] * 12, priority=0, max_tokens=2))
    plan = step(loop)
    assert plan.finished_request_ids == ["low"]
    assert plan.num_scheduled_tokens == {"urgent": 12}
    finish(loop)


def test_one_that_has_started_in_this_step_gives_way_to_one_that_had_no_seat_before() -> None:
    loop = make_loop(num_blocks=11, max_num_seqs=3, max_num_batched_tokens=64)
    a, b = Tenant("a", max_running=1), Tenant("b")
    loop.add(make_request("first", [1] * 4, priority=-1, tenant=b, max_tokens=6))
    loop.add(make_request("low", [2] * 3, priority=9, tenant=a, max_tokens=4))
    step(loop)
    loop.add(make_request("large", [3] * 28, priority=0, tenant=a, max_tokens=2))
    loop.add(make_request("early", [4] * 8, priority=1, tenant=b, max_tokens=2))
    loop.add(make_request("late", [5] * 2, priority=2, tenant=b, max_tokens=2))  # takes the place, and the seat, of low
    plan = step(loop)
    assert plan.num_scheduled_tokens == {"first": 1, "large": 28}
    finish(loop)
    assert loop.received["early"].facts.num_preemptions == 1


def test_nobody_gives_way_in_vain() -> None:
    """The blocks of the less urgent one would not be enough."""
    loop = make_loop(num_blocks=6, max_num_batched_tokens=64)
    loop.add(make_request("first", [1] * 9, priority=0, max_tokens=3))
    loop.add(make_request("low", [2] * 2, priority=1, max_tokens=3))
    step(loop)
    loop.add(make_request("urgent", [3] * 12, priority=0, max_tokens=2))
    plan = step(loop)
    assert plan.num_scheduled_tokens == {"first": 1, "low": 1}
    finish(loop)


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    loop = make_loop()
    loop.add(make_request("long", [1] * 40, priority=1))
    step(loop)
    loop.add(make_request("urgent", [2] * 10, priority=0))
    plans = [step(loop).num_scheduled_tokens for _ in range(3)]
    assert plans == [{"urgent": 7, "long": 1}, {"urgent": 3, "long": 5}, {"urgent": 1, "long": 7}]
    finish(loop)


def test_equals_do_not_push_each_other_around() -> None:
    loop = make_loop(max_num_seqs=1)
    loop.add(aged(make_request("late", [1], max_tokens=4), 5.0))
    step(loop)
    loop.add(aged(make_request("early", [2], max_tokens=1), 1.0))
    assert step(loop).num_scheduled_tokens == {"late": 1}
    finish(loop)


def test_with_ageing_nobody_waits_for_ever() -> None:
    """One level is worth ten seconds: who came 25 seconds before is not overtaken by a request two levels up."""
    loop = make_loop(max_num_seqs=1, priority_ageing=10.0)
    loop.add(aged(make_request("running", [1], priority=2, max_tokens=1), 0.0))
    loop.add(aged(make_request("old", [1], priority=2, max_tokens=3), 0.0))
    step(loop)
    loop.add(aged(make_request("young", [2], priority=0, max_tokens=1), 25.0))
    assert list(step(loop).num_scheduled_tokens) == ["old"]
    loop.add(aged(make_request("urgent", [2], priority=-2, max_tokens=1), 25.0))  # two levels before "old" in all
    assert list(step(loop).num_scheduled_tokens) == ["urgent"]
    assert [list(step(loop).num_scheduled_tokens) for _ in range(3)] == [["old"], ["old"], ["young"]]
    finish(loop)


def test_settings_have_bounds() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy = 'best': must be one of fcfs, priority"):
        SchedulerConfig(scheduling_policy="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="priority_ageing"):
        SchedulerConfig(priority_ageing=-1.0)
