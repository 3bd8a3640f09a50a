"""The repetition detector against the plain definition, over random tokens and random settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.repetition import NullDetector, PatternDetector, repetition_detector
from octavo.messages import RepetitionDetectionParams


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """A pattern of some allowed size stands ``min_count`` times in a row at the end."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        tail = tokens[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


@st.composite
def settings_of_patterns(draw: st.DrawFn) -> RepetitionDetectionParams:
    high = draw(st.integers(1, 7))
    return RepetitionDetectionParams(
        max_pattern_size=high, min_pattern_size=draw(st.integers(0, high)), min_count=draw(st.integers(2, 5))
    )


@given(settings_of_patterns(), st.lists(st.integers(0, 2), max_size=120))
def test_it_is_the_plain_definition(params: RepetitionDetectionParams, tokens: list[int]) -> None:
    detector = PatternDetector(params)
    for end, token in enumerate(tokens, 1):
        assert detector.feed(token) == repeats(tokens[:end], params)


@given(settings_of_patterns(), st.lists(st.integers(0, 50), min_size=1, max_size=7), st.lists(st.integers(0, 50)))
def test_a_pattern_repeated_often_enough_is_found(
    params: RepetitionDetectionParams, pattern: list[int], before: list[int]
) -> None:
    detector = PatternDetector(params)
    found = [detector.feed(token) for token in before + pattern * params.min_count]
    assert found[-1] or not params.min_pattern_size <= len(pattern) <= params.max_pattern_size


def test_a_token_costs_no_more_late_than_early() -> None:
    """Only the last max_pattern_size places of a token are kept."""
    params = RepetitionDetectionParams(max_pattern_size=16, min_pattern_size=16, min_count=10**9)
    detector = PatternDetector(params)
    for _ in range(5000):
        detector.feed(1)
    assert len(detector._places[1]) <= 2 * 16


def test_off_is_a_null_object() -> None:
    for off in (None, RepetitionDetectionParams(), RepetitionDetectionParams(min_count=3)):
        detector = repetition_detector(off)
        assert isinstance(detector, NullDetector)
        assert not any(detector.feed(1) for _ in range(50))
