"""Beam search over given candidates: which sequences go on, which are finished, and when to stop. Pure bookkeeping.

The rules are those of transformers' ``GenerationMixin._beam_search`` (greedy beams): of all continuations of all beams
the best ``max(2, 1 + number of end tokens) * width`` are looked at, in order. The first ``width`` that do not end go
on; those among the first ``width`` that end are finished. Log-probabilities are summed as float64 in the order of the
tokens; equal sums rank by (beam, rank of the token in its beam), so that a search has one result.

Knows nothing of requests, blocks or steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from octavo.messages import BeamSearch, TokenLogprobs


class BeamNode(NamedTuple):
    """A sequence, as its last token and the sequence before it. ``total`` is the sum of all log-probabilities."""

    parent: BeamNode | None
    token_id: int
    total: float
    logprobs: TokenLogprobs  # the token's own, then its rivals'

    def path(self) -> list[BeamNode]:
        """The nodes of all tokens, first to last."""
        nodes = []
        node: BeamNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Finished(NamedTuple):
    """A complete sequence. ``ended``: with an end token, else at the greatest length."""

    score: float
    node: BeamNode
    ended: bool


class Candidate(NamedTuple):
    """One continuation; in order of merit."""

    negative_total: float
    beam: int
    rank: int  # 0-based, in its beam


class Search:
    """One beam search. ``max_tokens`` is the length of the longest output, ``end_token_ids`` what finishes one.

    No output shorter than ``min_tokens`` ends. Each token keeps the log-probabilities of the ``num_rivals`` best ones.
    """

    def __init__(
        self,
        params: BeamSearch,
        *,
        end_token_ids: Collection[int],
        max_tokens: int,
        min_tokens: int = 0,
        num_rivals: int = 0,
    ) -> None:
        self._params = params
        self._ends = frozenset(end_token_ids)
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self._num_rivals = num_rivals
        self._length = 0
        self._beams: list[BeamNode | None] = [None]
        self.finished: list[Finished] = []  # best first, at most the width

    @property
    def num_candidates(self) -> int:
        """How many continuations of each beam :meth:`advance` needs to see."""
        return num_candidates(self._params.beam_width, len(self._ends))

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[tuple[int, int]]:
        """``candidates[b]``: continuations of beam b, best first (entry 0 is not looked at).

        Returns the new beams, best first, as (number of the beam before, token id). None of them: the search is over,
        and ``finished`` its result.
        """
        self._length += 1
        width, at_end = self._params.beam_width, self._length == self._max_tokens
        born: list[tuple[int, int]] = []
        beams: list[BeamNode | None] = []
        for place, (_, beam, rank) in enumerate(islice(self._ranking(candidates), self.num_candidates)):
            node = self._extend(beam, rank, candidates[beam])
            ends = node.token_id in self._ends
            if ends or at_end:
                if place < width:
                    self._finish(node, ends)
            elif len(born) < width:
                born.append((beam, node.token_id))
                beams.append(node)
        self._beams = beams
        return [] if self._is_over() else born

    def _ranking(self, candidates: Sequence[TokenLogprobs]) -> Iterator[Candidate]:
        """All continuations, best first. Each beam's are sorted already, so that few are touched."""

        def of_beam(beam: int) -> Iterator[Candidate]:
            node, entry = self._beams[beam], candidates[beam]
            total = node.total if node is not None else 0.0
            too_early = self._length < self._min_tokens
            for rank, (token_id, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)):
                if not (too_early and token_id in self._ends):
                    yield Candidate(-(total + logprob), beam, rank)

        return heapq.merge(*(of_beam(beam) for beam in range(len(candidates))))

    def _extend(self, beam: int, rank: int, entry: TokenLogprobs) -> BeamNode:
        node = self._beams[beam]
        token_id, logprob = entry.token_ids[1 + rank], entry.logprobs[1 + rank]
        rivals = slice(1, 1 + self._num_rivals)
        told = TokenLogprobs(
            [token_id, *entry.token_ids[rivals]], [logprob, *entry.logprobs[rivals]], [1 + rank, *entry.ranks[rivals]]
        )
        return BeamNode(node, token_id, (node.total if node is not None else 0.0) + logprob, told)

    def _finish(self, node: BeamNode, ended: bool) -> None:
        score = node.total / self._length**self._params.length_penalty
        self.finished.append(Finished(score, node, ended))
        self.finished.sort(key=lambda one: -one.score)  # stable: the older one first
        del self.finished[self._params.beam_width :]

    def _is_over(self) -> bool:
        if not self._beams or self._length == self._max_tokens:
            return True
        if len(self.finished) < self._params.beam_width:
            return False
        early = self._params.early_stopping
        if early is True:
            return True
        penalty, best = self._params.length_penalty, self._beams[0]
        assert best is not None
        length = self._max_tokens if early == "never" and penalty > 0.0 else self._length
        return best.total / length**penalty <= self.finished[-1].score


def num_candidates(beam_width: int, num_ends: int) -> int:
    """Continuations of a beam that matter: enough for ``beam_width`` beams to go on if all others end."""
    return max(2, 1 + num_ends) * beam_width
