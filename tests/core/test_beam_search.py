"""Beam search: the bookkeeping against the thirty-line reference, then through scheduler and block pool."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.core.beam_search import Search
from octavo.messages import BeamSearch, FinishReason, TokenLogprobs
from tests.core.beam_reference import Tokens, beam_search
from tests.core.checking_worker import Loop, cache_config, make_request

PENALTIES = [0.0, 1.0, 0.5, 2.0, -1.0]
EARLY = [False, True, "never"]


def table(seed: int, vocab: int, grain: int) -> dict[Tokens, list[float]]:
    """Log-probabilities by output so far, made when asked for; a coarse ``grain`` makes ties."""

    class Table(dict[Tokens, list[float]]):
        def __missing__(self, output: Tokens) -> list[float]:
            rng = random.Random(f"{seed} {output}")
            logits = [rng.randrange(grain) / grain * 4 for _ in range(vocab)]
            total = math.log(sum(math.exp(x) for x in logits))
            self[output] = [x - total for x in logits]
            return self[output]

    return Table()


def run(search: Search, rows: dict[Tokens, list[float]]) -> list[tuple[float, Tokens]]:
    """Feed a search as many candidates of each beam as it asks for."""
    beams: list[Tokens] = [()]
    while beams:
        entries = []
        for output in beams:
            row = rows[output]
            ranked = sorted(range(len(row)), key=lambda t: (-row[t], t))[: search.num_candidates]
            entries.append(
                TokenLogprobs([-1, *ranked], [0.0, *(row[t] for t in ranked)], [0, *range(1, len(ranked) + 1)])
            )
        beams = [(*beams[beam], token_id) for beam, token_id in search.advance(entries)]
    return [(one.score, tuple(node.token_id for node in one.node.path())) for one in search.finished]


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 6),
    num_ends=st.integers(0, 3),
    grain=st.sampled_from([3, 1000]),
    max_tokens=st.integers(1, 7),
    min_tokens=st.integers(0, 3),
    penalty=st.sampled_from(PENALTIES),
    early=st.sampled_from(EARLY),
)
@settings(max_examples=300, deadline=None)
def test_equal_to_the_reference(
    seed: int,
    width: int,
    num_ends: int,
    grain: int,
    max_tokens: int,
    min_tokens: int,
    penalty: float,
    early: bool | str,
) -> None:
    ends, rows = set(range(num_ends)), table(seed, 24, grain)
    params = BeamSearch(beam_width=width, length_penalty=penalty, early_stopping=early)
    minimum = min(min_tokens, max_tokens)
    search = Search(params, end_token_ids=ends, max_tokens=max_tokens, min_tokens=minimum)
    expected = beam_search(
        rows.__getitem__,
        width=width,
        ends=ends,
        max_tokens=max_tokens,
        length_penalty=penalty,
        early_stopping=early,
        min_tokens=minimum,
    )
    assert run(search, rows) == expected
    assert [one.ended for one in search.finished] == [output[-1] in ends for _, output in expected]


def test_hand_set_logits() -> None:
    """Greedy would begin with 1; the best pair begins with 2. 0 ends."""
    first = {(): [0.0, 0.6, 0.4, 0.0], (1,): [0.4, 0.3, 0.3, 0.0], (2,): [0.9, 0.1, 0.0, 0.0]}
    rows = {output: [math.log(p) if p else -1e9 for p in row] for output, row in first.items()}
    search = Search(BeamSearch(beam_width=2, length_penalty=0.0), end_token_ids=[0], max_tokens=2)
    found = run(search, rows)
    assert [output for _, output in found] == [(2, 0), (1, 0)]
    assert [math.exp(score) for score, _ in found] == pytest.approx([0.36, 0.24])


def test_a_wide_search_finds_the_best_of_all_sequences() -> None:
    rows = table(5, 4, 1000)
    search = Search(
        BeamSearch(beam_width=64, length_penalty=0.0, early_stopping="never"), end_token_ids=[], max_tokens=3
    )
    found = run(search, rows)
    every = [
        (rows[()][a] + rows[(a,)][b] + rows[(a, b)][c], (a, b, c)) for a, b, c in itertools.product(range(4), repeat=3)
    ]
    assert found == sorted(every, key=lambda one: (-one[0], one[1]))


def test_each_token_keeps_its_logprob_and_rank_and_those_of_its_rivals() -> None:
    rows = table(9, 12, 1000)
    params = BeamSearch(beam_width=3)
    search = Search(params, end_token_ids=[], max_tokens=4, num_rivals=2)
    run(search, rows)
    for one in search.finished:
        output: Tokens = ()
        for node in one.node.path():
            row = rows[output]
            ranked = sorted(range(12), key=lambda t: -row[t])
            assert node.logprobs.token_ids == [node.token_id, *ranked[:2]]
            assert node.logprobs.logprobs == [row[t] for t in node.logprobs.token_ids]
            assert node.logprobs.ranks == [ranked.index(node.token_id) + 1, 1, 2]
            output = (*output, node.token_id)
        assert one.node.total == sum(node.logprobs.logprobs[0] for node in one.node.path())


def loop_of(*, num_blocks: int = 60, max_num_seqs: int = 8, caching: bool = True, depth: int = 1) -> Loop:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    cache = cache_config(4, enable_prefix_caching=caching)
    return Loop(config, cache, num_blocks=num_blocks, max_model_len=60, depth=depth)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("room", [(60, 8), (60, 3), (12, 8), (7, 2)], ids=["roomy", "waves", "tight", "both"])
def test_beams_through_scheduler_and_pool(room: tuple[int, int], caching: bool, depth: int) -> None:
    num_blocks, max_num_seqs = room
    loop = loop_of(num_blocks=num_blocks, max_num_seqs=max_num_seqs, caching=caching, depth=depth)
    for number, (width, n) in enumerate([(4, 4), (5, 2), (1, 1)]):
        beams = BeamSearch(beam_width=width, early_stopping="never")
        loop.add(
            make_request(f"b{number}", list(range(9 + number)), eos=number > 0, n=n, beam_search=beams, max_tokens=9)
        )
    loop.add(make_request("plain", [1, 2, 3], max_tokens=12))
    loop.add(make_request("many", [1, 2, 3, 4, 5], n=3, max_tokens=6))
    loop.run()
    loop.check_results()
    assert all(one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for one in loop.received.values())


def test_blocks_are_shared_and_freed_each_step() -> None:
    loop = loop_of(caching=False)
    loop.add(make_request("b", list(range(16)), n=4, beam_search=BeamSearch(beam_width=4), max_tokens=12))
    pool, most = loop.scheduler._kv.pool, 0
    while loop.scheduler.has_requests():
        loop.step()
        most = max(most, pool.num_usable - pool.num_free)
    loop.check_results()
    # 4 blocks of prompt, and at most three more each for 11 computed tokens
    assert most <= 4 + 4 * 3
    assert most < 4 * 7, "nothing was shared"


@pytest.mark.parametrize("after", range(5))
def test_one_abort_ends_all_beams(after: int) -> None:
    loop = loop_of(max_num_seqs=2)
    loop.add(make_request("b", list(range(9)), n=3, beam_search=BeamSearch(beam_width=4), max_tokens=30))
    loop.add(make_request("plain", [1, 2, 3], max_tokens=4))
    for _ in range(after):
        loop.step()
    loop.abort(["b.1"])
    assert {loop.received[f"b.{i}"].finish_reason for i in range(3)} == {FinishReason.ABORT}
    loop.abort(["b.0", "b.2"])
    loop.run()
    loop.check_results()


def test_a_beam_that_fails_fails_the_search_alone() -> None:
    loop = loop_of()
    loop.add(make_request("b", list(range(9)), n=3, beam_search=BeamSearch(beam_width=3), max_tokens=30))
    loop.add(make_request("plain", [1, 2, 3], max_tokens=4))
    loop.worker.failing.add("b.0/4.1")
    loop.run()
    loop.check_results()
    assert {loop.received[f"b.{i}"].finish_reason for i in range(3)} == {FinishReason.ERROR}
    assert loop.received["plain"].finish_reason is FinishReason.LENGTH


def test_too_few_tokens_for_so_many_beams() -> None:
    loop = loop_of()
    loop.add(make_request("b", [1, 2], n=30, beam_search=BeamSearch(beam_width=30), max_tokens=1))
    loop.run()
    assert {one.finish_reason for one in loop.received.values()} == {FinishReason.ERROR}
