"""Loading is chosen where it was measured to be no slower than computing."""

from __future__ import annotations

from octavo.kv_transfer.costs import LEAST_TOKENS, STALE_SECONDS, Costs


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_has_not_been_measured_is_tried() -> None:
    costs = Costs(Clock())
    assert costs.worth("disk")
    costs.loaded("disk", 100, 50.0)
    assert costs.worth("disk")  # computing might be slower still
    costs.computed(100, 1.0)
    assert not costs.worth("disk")
    assert costs.worth("host")


def test_small_steps_say_nothing_about_prompts() -> None:
    costs = Costs(Clock())
    costs.computed(256, 0.256)
    costs.computed(LEAST_TOKENS - 1, 10.0)
    costs.loaded("disk", 16, 0.1)
    assert not costs.worth("disk")


def test_the_faster_one_wins_as_speeds_change() -> None:
    costs = Costs(Clock())
    costs.computed(100, 1.0)
    costs.loaded("disk", 100, 0.9)
    assert costs.worth("disk")
    for _ in range(30):
        costs.loaded("disk", 100, 2.0)
    assert not costs.worth("disk")
    for _ in range(30):
        costs.computed(100, 3.0)
    assert costs.worth("disk")


def test_a_slow_tier_is_tried_again_after_a_while() -> None:
    clock = Clock()
    costs = Costs(clock)
    costs.computed(100, 1.0)
    costs.loaded("disk", 100, 5.0)
    assert not costs.worth("disk")
    clock.now += STALE_SECONDS + 1
    assert costs.worth("disk")


def test_one_stall_is_forgotten_at_the_next_trial() -> None:
    clock = Clock()
    costs = Costs(clock)
    costs.computed(100, 1.0)
    costs.loaded("disk", 16, 3600.0)
    assert not costs.worth("disk")
    clock.now += STALE_SECONDS + 1
    costs.loaded("disk", 16, 0.001)
    assert costs.worth("disk")


def test_absurd_times_do_no_harm() -> None:
    costs = Costs(Clock())
    for seconds in (0.0, -5.0, 1e300):
        costs.computed(100, seconds)
    costs.loaded("disk", 0, 7.0)
    assert costs.worth("disk")
    costs.loaded("disk", 16, 1e-300)
    assert costs.worth("disk")
