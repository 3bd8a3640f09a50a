"""Layers into groups: all of one window, equally many, none lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.program.kv_groups import group_layers


@pytest.mark.parametrize(
    ("windows", "groups", "size"),
    [
        ([None] * 4, (None,), 4),
        ([8] * 3, (8,), 3),
        ([8, 8, None, 8, 8, None], (8, None, 8), 2),
        ([512] * 5 + [None] + [512] * 5 + [None], (512, 512, 512, None, 512, 512), 2),
        ([8, None] * 5 + [8], (8, None), 6),  # nearly as many of each: one place stays empty
        ([], (None,), 1),
    ],
)
def test_examples(windows: list[int | None], groups: tuple[int | None, ...], size: int) -> None:
    found = group_layers(windows)
    assert (found.windows, found.layers_per_block) == (groups, size)


@given(windows=st.lists(st.sampled_from([None, 4, 9]), max_size=60))
def test_every_layer_has_a_place_of_its_own(windows: list[int | None]) -> None:
    found = group_layers(windows)
    assert len(set(found.places)) == len(found.places) == len(windows)
    assert {group for group, _ in found.places} == set(range(len(found.windows))) or not windows
    for window, (group, place) in zip(windows, found.places, strict=True):
        assert found.windows[group] == window
        assert 0 <= place < found.layers_per_block
