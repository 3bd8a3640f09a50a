"""InputBatch: the immutable view of one forward pass, and how a step is cut into passes.

A step is one pass, unless requests want prompt logprobs: their logits need a row per prompt token, and whole chunks
of them would take hundreds of megabytes. Then the step is cut so that no pass has more than a fixed number of such
rows. Cutting a chunk changes no bit of its result, as chunked prefill does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from octavo.backends.base import StepInputs
from octavo.worker.block_tables import BlockTables
from octavo.worker.request_states import RequestStates

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which tokens of which requests: positions ``starts[s] .. starts[s] + counts[s] - 1`` of row ``rows[s]``.

    The last ``num_drafts[s]`` of them are drafts, which stand behind the row's known tokens.
    """

    rows: IntArray  # [S] rows of RequestStates
    starts: IntArray  # [S]
    counts: IntArray  # [S], all positive
    num_drafts: IntArray  # [S], each less than its count

    @property
    def ends(self) -> IntArray:
        return self.starts + self.counts

    def part(self, chosen: npt.NDArray[np.bool_]) -> Chunks:
        """Those of the ``chosen`` requests."""
        return Chunks(self.rows[chosen], self.starts[chosen], self.counts[chosen], self.num_drafts[chosen])


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Logits ``first_logit + i`` predict the prompt token at position ``first_position + i`` of ``row``."""

    row: int
    first_logit: int
    first_position: int
    count: int


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One pass: what the program reads, and what its logits are for."""

    inputs: StepInputs
    sampled_rows: IntArray  # rows of RequestStates that get a token
    sampled_logits: IntArray  # the logits it is drawn from; those behind the row's drafts follow
    prompt_spans: list[PromptSpan]


def prompt_rows(states: RequestStates, chunks: Chunks) -> tuple[IntArray, IntArray]:
    """``[S]`` each: how many positions of a chunk predict a prompt token whose logprob is wanted, and how many of the
    chunk's positions come before these."""
    wanted = states.wants_prompt_logprobs[chunks.rows]
    first = np.maximum(chunks.starts, states.prompt_logprob_start[chunks.rows])
    last = np.minimum(chunks.ends, states.num_prompt_tokens[chunks.rows] - 1)
    needed = np.where(wanted, np.maximum(last - first, 0), 0)
    return needed, np.where(needed > 0, first - chunks.starts, 0)


def split_passes(states: RequestStates, chunks: Chunks, max_prompt_rows: int) -> Iterator[Chunks]:
    """Cut a step into passes of at most ``max_prompt_rows`` (positive) prompt rows each.

    Pieces of one request come in order, one in a pass; a request without prompt rows (so any with drafts) is whole and
    in the first pass.
    """
    needed, skipped = prompt_rows(states, chunks)
    while needed.sum() > max_prompt_rows:
        before = np.cumsum(needed) - needed
        budget = np.maximum(max_prompt_rows - before, 0)
        take = np.where(needed <= budget, chunks.counts, skipped + budget)
        used = take > 0
        yield replace(chunks, counts=take).part(used)
        left = take < chunks.counts
        chunks = replace(chunks, starts=chunks.starts + take, counts=chunks.counts - take).part(left)
        needed, skipped = prompt_rows(states, chunks)
    yield chunks


def build_input_batch(states: RequestStates, tables: BlockTables, chunks: Chunks) -> InputBatch:
    """The pass that computes ``chunks``. A chunk that reaches its request's last known token, or draft, is sampled.

    tokens of the pass   | chunk 0        | chunk 1 |  ...     T in all
    query_start_loc      0                n0        n0+n1
    logit_rows           scored rows of chunk 0; if it is sampled, its last row and one more for each draft; those of 1
    """
    rows, counts = chunks.rows, chunks.counts
    ends = chunks.ends
    if counts.max(initial=1) == 1:  # decoding alone: every array call saved is a microsecond or more
        offsets, token_rows, positions = np.arange(rows.size + 1), rows, chunks.starts
    else:
        offsets = np.zeros(rows.size + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        token_rows = np.repeat(rows, counts)
        positions = np.arange(offsets[-1]) + np.repeat(chunks.starts - offsets[:-1], counts)

    sampled = np.flatnonzero(ends == states.num_tokens[rows] + chunks.num_drafts)
    logit_rows, first = offsets[sampled + 1] - 1, np.arange(sampled.size)
    spans: list[PromptSpan] = []
    if states.wants_prompt_logprobs[rows].any() or chunks.num_drafts.any():
        logit_rows, first, spans = _several_rows(states, chunks, offsets, sampled)
    inputs = StepInputs(
        token_ids=states.token_ids[token_rows, positions],
        positions=positions.astype(np.int32),
        slot_mapping=tables.slots(token_rows, positions),
        query_start_loc=offsets.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=tables.of(rows),
        logit_rows=logit_rows.astype(np.int32),
    )
    return InputBatch(inputs, rows[sampled], first, spans)


def _several_rows(
    states: RequestStates, chunks: Chunks, offsets: IntArray, sampled: IntArray
) -> tuple[IntArray, IntArray, list[PromptSpan]]:
    """(rows of T that need logits, which of them are sampled first, what those of the prompt predict)."""
    needed, skipped = prompt_rows(states, chunks)
    wanted, tails = needed.copy(), 1 + chunks.num_drafts[sampled]
    wanted[sampled] += tails
    ends = np.cumsum(wanted)  # of each chunk's logits
    firsts = ends - wanted
    # Scored rows are the first rows of a chunk but for the skipped ones, sampled ones its last.
    logit_rows = np.arange(ends[-1]) + np.repeat(offsets[:-1] + skipped - firsts, wanted)
    logit_rows[_last(tails, ends[sampled])] = _last(tails, offsets[sampled + 1])
    spans = [
        PromptSpan(int(chunks.rows[s]), int(firsts[s]), int(chunks.starts[s] + skipped[s]) + 1, int(needed[s]))
        for s in np.flatnonzero(needed)
    ]
    return logit_rows, ends[sampled] - tails, spans


def _last(counts: IntArray, ends: IntArray) -> IntArray:
    """``ends[i] - counts[i] .. ends[i] - 1`` for each i, one after the other."""
    return np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
