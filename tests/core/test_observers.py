"""A scheduler of given parts: it asks each rule and requirement, and tells each observer what becomes of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.config import SchedulerConfig
from octavo.core.admission import LengthLimits
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.prefix_finder import Prefix
from octavo.core.observers import Observer
from octavo.core.policy import FcfsPolicy
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.suspects import Suspects
from octavo.messages import ModelRunnerOutput
from tests.core.checking_worker import make_request


class Diary(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def queued(self, request: Request) -> None:
        self.entries.append(f"{request.request_id} queued")

    def admitted(self, request: Request, found: Prefix | None) -> None:
        self.entries.append(f"{request.request_id} found {None if found is None else found.num_tokens}")

    def preempted(self, request: Request) -> None:
        self.entries.append(f"{request.request_id} preempted")

    def finished(self, request: Request) -> None:
        self.entries.append(f"{request.request_id} finished")

    def take_stats(self) -> Mapping[str, Any]:
        return {"num_preemptions_delta": sum(entry.endswith("preempted") for entry in self.entries)}


class Alone:
    """A rule: requests run one by one."""

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        return not running


class Listed:
    """A requirement: the request is on the list."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def begin(self, running: Sequence[Request]) -> None:
        """It does not depend on what runs."""

    def is_met(self, request: Request) -> bool:
        return request.request_id in self.names


def scheduler_of(num_blocks: int, **parts: Any) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=64)
    limits = LengthLimits(max_model_len=100, max_kv_tokens=4 * (num_blocks - 1), max_step_tokens=None)
    given: dict[str, Any] = {"rules": [], "requirements": [], "observers": [], "clock": lambda: 0.0, **parts}
    return Scheduler(config, KVCacheManager(num_blocks, 4), FcfsPolicy(), limits, Suspects(), **given)


def step(scheduler: Scheduler) -> list[str]:
    plan = scheduler.schedule()
    sampled = {name: [9] for name in plan.num_scheduled_tokens}
    scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=sampled))
    return list(plan.num_scheduled_tokens)


def test_each_observer_hears_what_becomes_of_requests() -> None:
    diaries = [Diary(), Diary()]
    scheduler = scheduler_of(5, observers=diaries)
    scheduler.add_request(make_request("a", [1] * 8, max_tokens=2))
    scheduler.add_request(make_request("b", [2] * 7, max_tokens=3))
    step(scheduler)
    step(scheduler)  # "a" takes a third block, and there are four
    assert scheduler.stats().num_preemptions_delta == 1
    while scheduler.has_requests():
        step(scheduler)
    told = ["a queued", "b queued", "a found 0", "b found 0", "b preempted", "a finished", "b finished"]
    assert [diary.entries for diary in diaries] == [told, told]


def test_a_rule_holds_up_all_and_a_requirement_the_request_that_lacks_it() -> None:
    listed = Listed("b", "c")
    scheduler = scheduler_of(20, rules=[Alone()], requirements=[listed])
    for name in "abc":
        scheduler.add_request(make_request(name, [1, 2], max_tokens=2))
    assert [step(scheduler), step(scheduler)] == [["b"], ["b"]], "it passes a, and c may not run beside it"
    assert scheduler.stats().num_deferred == 1
    listed.names.add("a")
    assert [step(scheduler), step(scheduler), step(scheduler)] == [["a"], ["a"], ["c"]]
