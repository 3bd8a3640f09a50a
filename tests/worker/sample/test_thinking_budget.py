"""The thinking is closed in time, and only where it is open."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.worker.sample.processors import ThinkingBudget

START, END = 7, 8


@pytest.mark.parametrize(
    ("start", "output", "forced"),
    [
        (None, [], False),
        (None, [1], False),
        (None, [1, 2], True),
        (None, [1, 2, 3], True),
        (None, [1, 2, END], False),
        (None, [1, 2, END, 3, 4], False),
        (START, [1, 2, 3], False),
        (START, [START, 1], False),
        (START, [5, START, 1, 2], True),
        (START, [5, START, 1, END, 3], False),
    ],
)
def test_the_closing_tag_is_all_that_is_left_when_the_budget_is_spent(
    start: int | None, output: list[int], forced: bool
) -> None:
    prompt = [END, START, 3]  # tags in the prompt are of other messages
    row = np.arange(10, dtype=np.float32)
    ThinkingBudget(2, start, END).apply(row, np.array(prompt + output, np.int32), len(prompt))
    chance = np.exp((row - row.max()) / np.float32(2.0))
    assert np.flatnonzero(chance).tolist() == ([END] if forced else list(range(10)))


def test_a_budget_of_nothing_closes_at_once() -> None:
    row = np.full(10, -np.inf, np.float32)
    ThinkingBudget(0, None, END).apply(row, np.array([1, 2], np.int32), 2)
    assert row.argmax() == END
