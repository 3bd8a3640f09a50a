"""Request states, block tables and input batches against a plain Python construction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.exceptions import RequestError
from octavo.messages import SamplingParams
from octavo.worker.block_tables import BlockTables
from octavo.worker.input_batch import Chunks, InputBatch, build_input_batch, split_passes
from octavo.worker.request_states import RequestStates
from tests.worker.tiny_model import new_request

BLOCK, MAX_LEN, ROWS, VOCAB = 4, 40, 5, 50


class StatesMachine(RuleBasedStateMachine):
    """Requests come, grow, stop and come again; a dict of lists is the model."""

    @initialize()
    def start(self) -> None:
        self.states = RequestStates(ROWS, MAX_LEN, VOCAB)
        self.tables = BlockTables(ROWS, MAX_LEN // BLOCK, BLOCK)
        self.model: dict[str, tuple[list[int], int, list[int]]] = {}
        self.next_id = 0

    @rule(
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN),
        data=st.data(),
    )
    def add(self, tokens: list[int], data: st.DataObject) -> None:
        prompt = data.draw(st.integers(1, len(tokens)))
        blocks = data.draw(st.lists(st.integers(1, 99), max_size=MAX_LEN // BLOCK))
        request_id = f"r{self.next_id}"
        self.next_id += 1
        request = new_request(request_id, tokens, SamplingParams(), num_prompt_tokens=prompt, block_ids=blocks)
        if len(self.model) == ROWS:
            with pytest.raises(RequestError, match="taken"):
                self.states.add(request)
            return
        self.tables.assign(self.states.add(request), blocks)
        self.model[request_id] = (list(tokens), prompt, list(blocks))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), token=st.integers(0, VOCAB - 1), blocks=st.lists(st.integers(1, 99), max_size=3))
    def grow(self, data: st.DataObject, token: int, blocks: list[int]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model)))
        row = self.states.row_of[request_id]
        tokens, _, table = self.model[request_id]
        self.states.append(np.array([row]), np.array([token], np.int32))
        if len(tokens) < MAX_LEN:
            tokens.append(token)
        if len(table) + len(blocks) > MAX_LEN // BLOCK:
            with pytest.raises(RequestError):
                self.tables.append(row, blocks)
        else:
            self.tables.append(row, blocks)
            table.extend(blocks)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model)))
        self.states.remove(request_id)
        self.states.remove(request_id)  # unknown by now: ignored
        del self.model[request_id]

    @invariant()
    def equals_the_model(self) -> None:
        assert set(self.states.row_of) == set(self.model)
        assert len(set(self.states.row_of.values())) == len(self.model)
        for request_id, (tokens, prompt, blocks) in self.model.items():
            row = self.states.row_of[request_id]
            assert self.states.tokens(row).tolist() == tokens
            assert self.states.num_prompt_tokens[row] == prompt
            assert self.tables.table[0, row].tolist() == blocks + [0] * (MAX_LEN // BLOCK - len(blocks))
            assert self.tables.num_tokens(np.array([row])).tolist() == [len(blocks) * BLOCK]


TestStates = StatesMachine.TestCase
TestStates.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@st.composite
def steps(draw: st.DrawFn) -> tuple[RequestStates, BlockTables, list[tuple[int, int, int]]]:
    """States with some requests, and (row, start, count) for some of them, in any order."""
    states, tables = RequestStates(ROWS, MAX_LEN, VOCAB), BlockTables(ROWS, MAX_LEN // BLOCK, BLOCK)
    chunks = []
    for i in range(draw(st.integers(1, ROWS))):
        length = draw(st.integers(1, MAX_LEN))
        prompt = draw(st.integers(1, length))
        wants = draw(st.booleans())
        blocks = draw(st.permutations(range(1, 90)))[: MAX_LEN // BLOCK]
        request = new_request(
            f"r{i}",
            [draw(st.integers(0, VOCAB - 1)) for _ in range(length)],
            SamplingParams(prompt_logprobs=1 if wants else None),
            num_prompt_tokens=prompt,
            block_ids=list(blocks),
        )
        row = states.add(request)
        tables.assign(row, request.block_ids)
        start = draw(st.integers(0, length - 1))
        count = draw(st.integers(1, length - start))
        drafts: list[int] = []
        if start + count == length and start >= prompt - 1:  # as the scheduler plans them: behind all known tokens
            drafts = draw(st.lists(st.integers(0, VOCAB - 1), max_size=MAX_LEN - length))
            states.place_drafts(row, drafts)
        chunks.append((row, start, count + len(drafts), len(drafts)))
    order = draw(st.permutations(chunks))
    return states, tables, list(order[: draw(st.integers(1, len(order)))])


Chunk = tuple[int, int, int, int]


def as_chunks(chunks: list[Chunk]) -> Chunks:
    return Chunks(*(np.array(column, np.int64) for column in zip(*chunks)))


def check_batch(
    states: RequestStates, tables: BlockTables, chunks: list[Chunk], batch: InputBatch
) -> dict[str, list[tuple[int, int]]]:
    """Compare with the plain construction; (row, position) that the logits are read for, sampled and prompt."""
    expected: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "slots", "seq", "logits", "sampled")}
    starts = [0]
    behind_drafts: list[int] = []
    reads: dict[str, list[tuple[int, int]]] = {"sampled": [], "prompt": []}
    for row, start, count, num_drafts in chunks:
        known, prompt = int(states.num_tokens[row]), int(states.num_prompt_tokens[row])
        tokens = states.token_ids[row, : known + num_drafts].tolist()
        for position in range(start, start + count):
            if states.wants_prompt_logprobs[row] and position + 1 < prompt:
                reads["prompt"].append((row, position + 1))
                expected["logits"].append(len(expected["tokens"]))
            elif position == known - 1:
                reads["sampled"].append((row, position))
                expected["sampled"].append(len(expected["logits"]))
                expected["logits"].append(len(expected["tokens"]))
            elif position >= known:
                behind_drafts.append(len(expected["logits"]))
                expected["logits"].append(len(expected["tokens"]))
            expected["tokens"].append(tokens[position])
            expected["positions"].append(position)
            expected["slots"].append(int(tables.table[0, row, position // BLOCK]) * BLOCK + position % BLOCK)
        starts.append(starts[-1] + count)
        expected["seq"].append(start + count)
    inputs = batch.inputs
    assert inputs.token_ids.tolist() == expected["tokens"]
    assert inputs.positions.tolist() == expected["positions"]
    assert inputs.slot_mapping.tolist() == expected["slots"]
    assert inputs.query_start_loc.tolist() == starts
    assert inputs.seq_lens.tolist() == expected["seq"]
    assert inputs.logit_rows.tolist() == expected["logits"]
    assert inputs.block_tables.tolist() == [tables.table[0, row].tolist() for row, *_ in chunks]
    for name in inputs.__slots__:
        array = getattr(inputs, name)
        assert array.dtype == np.int32, name
        assert array.flags.c_contiguous, name
    assert batch.sampled_logits.tolist() == expected["sampled"]
    assert batch.sampled_rows.tolist() == [row for row, _ in reads["sampled"]]
    spans = [(s.row, s.first_position + i, s.first_logit + i) for s in batch.prompt_spans for i in range(s.count)]
    assert [(row, position) for row, position, _ in spans] == reads["prompt"]
    logits = [*expected["sampled"], *behind_drafts, *(logit for _, _, logit in spans)]
    assert sorted(logits) == list(range(len(expected["logits"])))
    return reads


@given(steps())
@settings(deadline=None)
def test_batch_equals_the_plain_construction(step):
    states, tables, chunks = step
    check_batch(states, tables, chunks, build_input_batch(states, tables, as_chunks(chunks)))


@given(steps(), st.integers(1, 20))
@settings(deadline=None)
def test_passes_cover_the_step_in_order_within_the_limit(step, limit):
    states, tables, chunks = step
    whole = check_batch(states, tables, chunks, build_input_batch(states, tables, as_chunks(chunks)))
    progress = {row: start for row, start, *_ in chunks}
    reads: dict[str, list[tuple[int, int]]] = {"sampled": [], "prompt": []}
    for number, part in enumerate(split_passes(states, as_chunks(chunks), limit)):
        columns = (part.rows, part.starts, part.counts, part.num_drafts)
        pieces = list(zip(*(column.tolist() for column in columns)))
        assert len({row for row, *_ in pieces}) == len(pieces)
        for row, start, count, _ in pieces:
            assert start == progress[row], "pieces of a request come in order, without holes"
            assert count > 0
            progress[row] += count
            assert number == 0 or states.wants_prompt_logprobs[row]
        batch = build_input_batch(states, tables, part)
        assert sum(span.count for span in batch.prompt_spans) <= limit
        for kind, more in check_batch(states, tables, pieces, batch).items():
            reads[kind] += more
    assert progress == {row: start + count for row, start, count, _ in chunks}
    assert {kind: sorted(found) for kind, found in reads.items()} == {k: sorted(v) for k, v in whole.items()}


def test_two_long_prompts_take_turns():
    states = RequestStates(ROWS, MAX_LEN, VOCAB)
    for i in range(2):
        params = SamplingParams(prompt_logprobs=0)
        states.add(new_request(f"r{i}", [1] * 8, params, block_ids=[]))
    first, second = (states.row_of[f"r{i}"] for i in range(2))
    parts = list(split_passes(states, as_chunks([(first, 0, 8, 0), (second, 2, 6, 0)]), 5))
    pieces = [list(zip(part.rows.tolist(), part.starts.tolist(), part.counts.tolist())) for part in parts]
    # 7 + 5 positions predict a prompt token; position 7 of each is the one that is sampled.
    assert pieces == [[(first, 0, 5)], [(first, 5, 3), (second, 2, 3)], [(second, 5, 3)]]
