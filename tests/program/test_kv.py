"""Layers into groups: all of one kind and window, nearly equally wide, none lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import kind_of
from octavo.program import KVGroup, LayerKV
from octavo.program.kv import group_layers


def equal_layers(windows: list[int | None]) -> list[LayerKV]:
    return [LayerKV(2, 16, 16, kind_of(window), window) for window in windows]


@pytest.mark.parametrize(
    ("windows", "groups", "size"),
    [
        ([None] * 4, [None], 4),
        ([8] * 3, [8], 3),
        ([8, 8, None, 8, 8, None], [8, None, 8], 2),
        ([512] * 5 + [None] + [512] * 5 + [None], [512, 512, 512, None, 512, 512], 2),
        ([8, None] * 5 + [8], [8, None], 6),  # nearly as many of each: one place stays empty
    ],
)
def test_equal_layers(windows: list[int | None], groups: list[int | None], size: int) -> None:
    found = group_layers(equal_layers(windows))
    assert [group.window for group in found] == groups
    assert max(len(group.layers) for group in found) == size


def test_a_program_without_attention_has_one_group_of_nothing() -> None:
    assert group_layers([]) == (KVGroup(()),)


def test_layers_of_other_shapes_share_a_table() -> None:
    shapes = [LayerKV(1, 16, 16), LayerKV(4, 64, 32), LayerKV(2, 16, 48)]
    assert group_layers(shapes) == (KVGroup((0, 1, 2)),)


def test_wide_full_layers_beside_narrow_sliding_ones() -> None:
    """Four sliding layers are as wide as one full layer: a group each, and no block is half empty."""
    sliding, full = LayerKV(2, 16, 16, "sliding", 8), LayerKV(2, 64, 64)
    found = group_layers([sliding] * 4 + [full] + [sliding] * 4)
    assert found == (KVGroup((0, 1, 2, 3), "sliding", 8), KVGroup((4,)), KVGroup((5, 6, 7, 8), "sliding", 8))


KINDS = st.sampled_from([("full", None), ("latent", None), ("sliding", 4), ("sliding", 9)])
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 80), st.integers(1, 80))
LAYERS = st.builds(lambda sizes, kind: LayerKV(*sizes, *kind), SIZES, KINDS)


@given(layers=st.lists(LAYERS, max_size=60))
def test_every_layer_has_a_place_of_its_own(layers: list[LayerKV]) -> None:
    groups = group_layers(layers)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    for group in groups:
        kept = {(layers[layer].kind, layers[layer].window) for layer in group.layers}
        assert kept <= {(group.kind, group.window)}
        assert list(group.layers) == sorted(group.layers)


@given(windows=st.lists(st.sampled_from([None, 4, 9]), max_size=60))
def test_equal_layers_fill_groups_of_equal_size(windows: list[int | None]) -> None:
    groups = group_layers(equal_layers(windows))
    size = max(len(group.layers) for group in groups)
    for window in set(windows):
        sizes = [len(group.layers) for group in groups if group.window == window]
        assert sizes[:-1] == [size] * (len(sizes) - 1), "only the last group of a window has empty places"
