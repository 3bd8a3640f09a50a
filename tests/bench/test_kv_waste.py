"""The waste benchmark counts every slot once, and its allocators do what they say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def waste() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("kv_waste", FOLDER / "kv_waste.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["kv_waste"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_first_fit_takes_the_first_hole_that_is_large_enough(waste: ModuleType) -> None:
    memory = waste.Contiguous(lambda prompt, answer: prompt + answer)
    third = waste.SLOTS // 4
    for _ in range(3):
        assert memory.start(third - 1, 1)
    assert memory.start(10, waste.SLOTS - 3 * third - 10)
    assert not memory.start(1, 1)
    memory.step()  # the three are complete and leave; the fourth has a token more
    assert memory.start(2 * third, third)
    assert not memory.start(1, 1)
    held = memory.step()
    assert (held.states, held.reserved, held.internal, held.external) == (
        2 * third + 11,
        waste.SLOTS - 2 * third - 11,
        0,
        0,
    )


def test_every_slot_is_counted_once(waste: ModuleType) -> None:
    lengths = waste.SHAREGPT.draw(120)
    for steps in (
        waste.run_contiguous(lengths, waste.power_of_two),
        waste.run_paged(lengths, 1),
        waste.run_paged(lengths, 16),
    ):
        rows = list(steps)
        assert rows
        for row in rows:
            assert sum(row[:4]) == waste.SLOTS
            assert min(row[:4]) >= 0


def test_blocks_of_one_token_waste_nothing_inside(waste: ModuleType) -> None:
    lengths = waste.SHAREGPT.draw(120)
    assert all(row.internal == 0 for row in waste.run_paged(lengths, 1))
    # at most a block, less a token, of each request
    assert all(0 <= row.internal <= 15 * row.running for row in waste.run_paged(lengths, 16))
