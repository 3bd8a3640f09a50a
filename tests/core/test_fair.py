"""Fairness between tenants: shares, bounds, and nobody who starves or saves up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.core.fair import FairPolicy
from octavo.messages import Tenant
from tests.core.checking_worker import Loop, cache_config, make_request

NUM_BLOCKS = 65
POOL = 4 * (NUM_BLOCKS - 1)  # tokens


def make_loop(**changes: object) -> Loop:
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "scheduling_policy": "fair", **changes}
    return Loop(SchedulerConfig(**fields), cache_config(4, enable_prefix_caching=False), num_blocks=NUM_BLOCKS)


class Service:
    """What each tenant was given: the plans of a run, in the paper's currency."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.given: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()

    def step(self) -> None:
        plan = self.loop.step()
        assert plan is not None
        for request_id, count in plan.num_scheduled_tokens.items():
            self.given[request_id[0]] += count
        for request_id, received in self.loop.received.items():
            self.samples[request_id] = len(received.tokens)

    def of(self, name: str) -> int:
        return self.given[name] + sum(count for request_id, count in self.samples.items() if request_id[0] == name)


shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=5)


@given(
    weights=st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.sampled_from([1.0, 3.0])),
    first=shapes,
    second=shapes,
    num_seqs=st.integers(2, 6),
)
@settings(max_examples=60, deadline=None)
def test_backlogged_tenants_get_service_in_proportion_to_their_weights(
    weights: tuple[float, float], first: list, second: list, num_seqs: int
) -> None:
    """The paper's bound: 2 max(w_p L, w_q M), L the longest prompt and M what a batch holds, in tokens."""
    loop = make_loop(max_num_seqs=num_seqs)
    service = Service(loop)
    tenants = {"a": Tenant("a", weights[0]), "b": Tenant("b", weights[1])}
    added: Counter[str] = Counter()
    bound = 2 * max(40, 2 * min(POOL, num_seqs * 60)) / min(weights)
    for _ in range(150):
        for name, kinds in (("a", first), ("b", second)):
            waiting = sum(request.request_id[0] == name for request in loop.scheduler._policy)
            for _ in range(num_seqs + 1 - waiting):  # neither queue is ever empty
                prompt, answer = kinds[added[name] % len(kinds)]
                fields = {"tenant": tenants[name], "max_tokens": answer}
                loop.add(make_request(f"{name}{added[name]}", [added[name] % 20] * prompt, **fields))
                added[name] += 1
        service.step()
        difference = service.of("a") / weights[0] - service.of("b") / weights[1]
        assert abs(difference) <= bound


def test_long_run_shares_are_the_weights() -> None:
    loop = make_loop()
    service = Service(loop)
    for number in range(150):
        for name, weight in (("a", 3.0), ("b", 1.0)):
            tenant = Tenant(name, weight)
            loop.add(make_request(f"{name}{number}", [number % 20] * 8, tenant=tenant, max_tokens=8))
    for _ in range(300):
        service.step()
    assert service.of("a") / service.of("b") == pytest.approx(3.0, rel=0.1)


def test_a_modest_tenant_starts_next_whatever_waits() -> None:
    loop = make_loop(max_num_seqs=2)
    for number in range(40):
        loop.add(make_request(f"f{number}", [number % 20] * 8, tenant=Tenant("flood"), max_tokens=6))
    for _ in range(9):
        loop.step()
    loop.add(make_request("modest", [1] * 8, tenant=Tenant("modest"), max_tokens=2))
    ended = sum(received.finish_reason is not None for received in loop.received.values())
    while loop.received["modest"].finish_reason is None:
        loop.step()
    later = sum(received.finish_reason is not None for received in loop.received.values())
    assert later - ended <= 3  # a seat became free, and it was taken
    loop.run()
    loop.check_results()


def test_a_modest_prompt_does_not_wait_behind_a_long_one_that_runs() -> None:
    loop = make_loop()
    loop.add(make_request("long", [1] * 200, tenant=Tenant("flood")))
    loop.step()
    loop.add(make_request("modest", [2] * 15, tenant=Tenant("modest")))
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"modest": 15, "long": 1}
    loop.run()
    loop.check_results()


def test_an_idle_tenant_saves_up_nothing() -> None:
    loop = make_loop(max_num_seqs=1)
    for number in range(60):
        loop.add(make_request(f"b{number}", [3] * 4, tenant=Tenant("busy"), max_tokens=2))
    for _ in range(60):
        loop.step()
    for number in range(20):
        loop.add(make_request(f"i{number}", [4] * 4, tenant=Tenant("idle until now"), max_tokens=2))
    starts = []
    for _ in range(40):
        plan = loop.step()
        assert plan is not None
        starts += [new.request_id[0] for new in plan.new_requests]
    assert len(starts) == 20
    assert abs(starts.count("i") - starts.count("b")) <= 2
    loop.run()


def test_nobody_starves_beside_many() -> None:
    """A tenant of a tiny weight still gets there."""
    loop = make_loop(max_num_seqs=1)
    loop.add(make_request("small0", [1] * 4, tenant=Tenant("small", 0.01), max_tokens=4))
    loop.add(make_request("small1", [1] * 4, tenant=Tenant("small", 0.01), max_tokens=4))
    number = 0
    while loop.received["small1"].finish_reason is None:
        assert number < 4000
        loop.add(make_request(f"x{number}", [2], tenant=Tenant(f"t{number % 7}"), max_tokens=1))
        loop.step()
        number += 1


def test_the_engine_never_stands_still_for_fairness() -> None:
    """Alone, a tenant gets every seat and every token, however far ahead it is."""
    loop = make_loop()
    for number in range(12):
        loop.add(make_request(f"a{number}", [number] * 4, tenant=Tenant("a"), max_tokens=4))
    plan = loop.step()
    assert plan is not None
    assert plan.total_num_scheduled_tokens == 16
    loop.run()


def test_max_running_defers_a_tenant_and_nobody_else() -> None:
    loop = make_loop(scheduling_policy="fcfs")
    capped = Tenant("capped", 1.0, 1)
    for number in range(3):
        loop.add(make_request(f"c{number}", [number] * 3, tenant=capped, max_tokens=3))
    loop.add(make_request("other", [7], tenant=Tenant("other"), max_tokens=9))
    plan = loop.step()
    assert plan is not None
    assert list(plan.num_scheduled_tokens) == ["c0", "other"]
    assert loop.scheduler.stats().num_deferred == 2
    loop.run()
    loop.check_results()


def test_within_a_tenant_priority_decides() -> None:
    loop = make_loop(max_num_seqs=1)
    for name, priority in (("b", 1), ("a", 0)):
        loop.add(make_request(name, [1], tenant=Tenant("t"), priority=priority, max_tokens=1))
    plan = loop.step()
    assert plan is not None
    assert list(plan.num_scheduled_tokens) == ["a"]
    loop.run()


def test_tenants_that_went_away_are_forgotten() -> None:
    loop = make_loop(max_num_seqs=2)
    for number in range(300):
        loop.add(make_request(f"r{number}", [1, 2], tenant=Tenant(f"t{number}"), max_tokens=2))
        loop.step()
    loop.run()
    policy = loop.scheduler._policy
    assert isinstance(policy, FairPolicy)
    assert len(policy._counters) < 20
