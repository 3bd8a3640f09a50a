"""Beam search in thirty lines, straight from its description, over whole rows of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Tokens = tuple[int, ...]


def beam_search(
    logprobs_of: Callable[[Tokens], Sequence[float]],
    *,
    width: int,
    ends: Collection[int],
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    min_tokens: int = 0,
) -> list[tuple[float, Tokens]]:
    """(score, output) of the best ``width`` sequences, best first. ``logprobs_of(output)[t]``: of token t after it."""
    beams: list[tuple[float, Tokens]] = [(0.0, ())]
    done: list[tuple[float, Tokens]] = []
    for length in range(1, max_tokens + 1):
        options = []
        for number, (total, output) in enumerate(beams):
            row = logprobs_of(output)
            for rank, token in enumerate(sorted(range(len(row)), key=lambda t: (-row[t], t))):
                if token not in ends or length >= min_tokens:
                    options.append((-(total + row[token]), number, rank, (*output, token)))
        best = sorted(options)[: max(2, 1 + len(ends)) * width]
        beams = []
        for place, (negative, _, _, output) in enumerate(best):
            if output[-1] in ends or length == max_tokens:
                done += [(-negative / length**length_penalty, output)] if place < width else []
            elif len(beams) < width:
                beams.append((-negative, output))
        done = sorted(done, key=lambda one: -one[0])[:width]
        if length == max_tokens or (len(done) == width and early_stopping is True):
            break
        hoped = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if len(done) == width and beams[0][0] / hoped**length_penalty <= done[-1][0]:
            break
    return done
