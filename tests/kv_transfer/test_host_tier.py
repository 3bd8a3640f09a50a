"""The host tier's places: who keeps one, who gives one up, and that the bytes are those that were put there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.exceptions import ConfigError
from octavo.kv_transfer.chain import TierChain
from octavo.kv_transfer.connectors.host.mover import HostMover
from octavo.kv_transfer.connectors.host.planner import HostTier
from octavo.kv_transfer.movers import Movers
from tests.kv_transfer.memory import BLOCK_BYTES, Memory, contents, key_of

KEYS = st.integers(0, 7)


class HostMachine(RuleBasedStateMachine):
    """Planner and mover together, one plan a rule; a key that is found gives its own bytes."""

    @initialize(capacity=st.integers(1, 5))
    def start(self, capacity: int) -> None:
        self.memory = Memory()
        mover = HostMover(self.memory, capacity * BLOCK_BYTES + 7)
        assert mover.info.capacity == capacity
        self.movers = Movers({"host": mover})
        tiers: list[HostTier] = []

        def make(emit: object) -> HostTier:
            tiers.append(HostTier(mover.info, emit, keeps_preempted=True))  # type: ignore[arg-type]
            return tiers[0]

        self.chain = TierChain([make])
        self.tier, self.step = tiers[0], 0
        self.pins: dict[int, int] = {}

    def run(self) -> None:
        self.step += 1
        reports = self.movers.run(self.chain.take_moves(self.step))
        assert self.chain.settle(self.step, reports, 0, 0.0) == []

    @rule(seed=KEYS)
    def evict(self, seed: int) -> None:
        self.memory.fill(3, seed)
        self.chain.evicted(key_of(seed), 3)
        self.run()

    @rule(seed=KEYS)
    def hold(self, seed: int) -> None:
        self.memory.fill(4, seed)
        if self.chain.hold([key_of(seed)], [4]):
            self.pins[seed] = self.pins.get(seed, 0) + 1
        else:
            assert len(self.pins) == self.tier.capacity, "there was room"
        self.run()

    @rule(seed=KEYS)
    def release(self, seed: int) -> None:
        if self.pins.get(seed):
            self.chain.release([key_of(seed)])
            self.pins[seed] -= 1
            if self.pins[seed] == 0:
                del self.pins[seed]

    @rule(seed=KEYS, other=KEYS)
    def load(self, seed: int, other: int) -> None:
        """A block is loaded into one that is evicted by the same plan."""
        if self.chain.find([key_of(seed)]):
            self.memory.fill(5, other)
            self.chain.pin([key_of(seed)])
            self.chain.evicted(key_of(other), 5)
            self.chain.load(key_of(seed), 5)
            self.chain.release([key_of(seed)])
            self.run()
            assert (self.memory.blocks[5] == contents(seed)).all()

    @rule(seed=KEYS)
    def forget(self, seed: int) -> None:
        self.chain.forget([key_of(seed)])
        self.pins.pop(seed, None)
        assert not self.chain.find([key_of(seed)])

    @rule(seed=KEYS)
    def void(self, seed: int) -> None:
        """A plan whose step raised: what it stored is not there, whether it was made or not."""
        known = bool(self.chain.find([key_of(seed)]))
        self.memory.fill(6, seed)
        self.chain.evicted(key_of(seed), 6)
        self.step += 1
        self.chain.take_moves(self.step)
        self.chain.void()
        assert bool(self.chain.find([key_of(seed)])) == known

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "chain"):
            assert len(self.tier) <= self.tier.capacity
            assert all(self.chain.find([key_of(seed)]) for seed in self.pins)


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("size", "why"), [(0, "a KV block takes 1000 bytes"), (999, "1000 bytes"), (1 << 60, "may take")]
)
def test_a_tier_that_cannot_be_had_is_an_error(size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"swap_space.*{why}"):
        HostMover(Memory(), size)


def test_the_budget_is_kept_to_the_byte() -> None:
    assert HostMover(Memory(), 5 * BLOCK_BYTES - 1).info.capacity == 4
    assert HostMover(Memory(), 5 * BLOCK_BYTES).info.capacity == 5
