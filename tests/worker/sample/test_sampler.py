"""Processors and the choice of a token, against plain formulas and by statistics: in NumPy, and natively per ISA."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends.base import SampledRows, SampleRows
from octavo.backends.cpu import _kernels
from octavo.backends.sampling import sample_rows, weights
from octavo.exceptions import ValidationError
from octavo.messages import NewRequestData, OutputOptions, SamplingParams, TokenLogprobs
from octavo.worker.sample.sampler import RequestSampler

VOCAB = 40


def choose(how: str, logits: np.ndarray, rows: SampleRows, adjusted: np.ndarray | None) -> SampledRows:
    """``sample_rows``, or the native sampler of an instruction set."""
    if how == "numpy":
        return sample_rows(logits, rows, adjusted, None)
    out = SampledRows.empty(rows)
    native = _kernels.Sampler(_kernels.ThreadPool(1), how)
    native.sample(logits, adjusted, None, rows.view(np.uint8), out.token_ids, out.ranks, out.logprob_ids, out.logprobs)
    return out


class Chooser:
    """One request's sampler on one implementation: row of logits in, token and logprobs out."""

    def __init__(self, how: str, params: SamplingParams, *, sample_index: int = 0, eos: list[int] | None = None):
        self.how, self.params, self.sample_index, self.eos = how, params, sample_index, eos

    def sample(self, raw: np.ndarray, token_ids: np.ndarray, prompt: int) -> tuple[int, TokenLogprobs | None]:
        request = sampler(self.params, sample_index=self.sample_index, eos=self.eos, vocab_size=raw.size)
        rows = request.row.copy()
        rows["position"] = token_ids.size
        adjusted = None
        if request.processors:
            adjusted = np.empty((1, raw.size), np.float32)
            request.adjust(raw, token_ids, prompt, adjusted[0])
            rows["adjusted_row"] = 0
        out = choose(self.how, raw[None], rows, adjusted)
        k, token = int(rows["num_logprobs"][0]), int(out.token_ids[0])
        if k < 0:
            return token, None
        ids, values = out.logprob_ids[0, : k + 1].tolist(), out.logprobs[0, : k + 1].tolist()
        return token, TokenLogprobs(ids, values, [int(out.ranks[0]), *range(1, k + 1)])


@pytest.fixture(params=["numpy", *_kernels.usable_isas()])
def how(request) -> str:
    return request.param


def sampler(
    params: SamplingParams, *, sample_index: int = 0, eos: list[int] | None = None, vocab_size: int = VOCAB
) -> RequestSampler:
    request = NewRequestData(
        request_id="r",
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[1],
        sampling_params=params,
        sample_index=sample_index,
        output=OutputOptions(eos_token_ids=eos or []),
    )
    return RequestSampler.of(request, vocab_size)


def processed(params: SamplingParams, row: np.ndarray, tokens: list[int], prompt: int, eos=()) -> np.ndarray:
    out = row.copy()
    for processor in sampler(params, eos=list(eos)).processors:
        processor.apply(out, np.array(tokens, np.int32), prompt)
    return out


def random_row(seed: int = 0, size: int = VOCAB, spread: float = 2.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


@given(TOKENS, st.data(), st.floats(0.2, 3), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 9))
def test_penalties_follow_their_formulas(tokens, data, repetition, frequency, presence, seed):
    """A05: repetition covers prompt and output once per token; frequency and presence cover output only."""
    prompt = data.draw(st.integers(1, len(tokens)))
    row = random_row(seed)
    expected = row.astype(np.float64)
    for token in set(tokens):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(tokens[prompt:]):
        expected[token] -= frequency * tokens[prompt:].count(token) + presence
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, temperature=0.0
    )
    np.testing.assert_allclose(processed(params, row, tokens, prompt), expected, rtol=1e-5, atol=1e-4)


def test_a05_prompt_tokens_are_not_output():
    row = random_row()
    repeated = [7] * 12
    for params in (SamplingParams(presence_penalty=2.0), SamplingParams(frequency_penalty=2.0)):
        np.testing.assert_array_equal(processed(params, row, repeated, 12), row)
        step_1 = processed(params, row, [*repeated, 7], 12)
        assert step_1[7] == row[7] - 2
        # Recomputed after a preemption: the same tokens with the same border.
        np.testing.assert_array_equal(processed(params, row, [*repeated, 7], 12), step_1)
    step_0 = processed(SamplingParams(repetition_penalty=1.5), np.abs(row), repeated, 12)
    assert step_0[7] == abs(row[7]) / np.float32(1.5)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_excludes_all_that_would_stop(ignore_eos):
    """A01: every EOS id and every stop id, until the minimum is reached; under ignore_eos an EOS stops nothing."""
    params = SamplingParams(min_tokens=3, max_tokens=9, stop_token_ids=[4], ignore_eos=ignore_eos)
    row = random_row()
    out = processed(params, row, [1, 2, 3, 3], 2, eos=(7, 9))  # 2 output tokens
    stops = {4} if ignore_eos else {4, 7, 9}
    assert set(np.flatnonzero(np.isneginf(out))) == stops
    np.testing.assert_array_equal(processed(params, row, [1, 2, 3, 3, 3], 2, eos=(7, 9)), row)


def test_allowed_ids_and_bias_and_their_order():
    row = random_row()
    out = processed(SamplingParams(allowed_token_ids=[3, 8], logit_bias={3: 1.5, 5: 100.0, 8: -1e9}), row, [1], 1)
    assert set(np.flatnonzero(np.isfinite(out))) == {3, 8}  # bias lifts no excluded token
    assert out[3] == row[3] + np.float32(1.5)
    assert out[8] == row[8] - np.float32(100)  # clamped


def test_masks_that_leave_nothing_and_penalties_that_overflow_are_errors():
    tokens = np.array([1, 2], np.int32)
    nothing = sampler(SamplingParams(allowed_token_ids=[4], stop_token_ids=[4], min_tokens=1))
    with pytest.raises(ValidationError, match="no token is left"):
        nothing.adjust(random_row(), tokens, 2, np.empty(VOCAB, np.float32))
    overflow = sampler(SamplingParams(repetition_penalty=1e-6))
    with np.errstate(all="ignore"), pytest.raises(ValidationError, match="overflow"):
        overflow.adjust(np.abs(random_row(spread=1e35)), tokens, 2, np.empty(VOCAB, np.float32))


def test_greedy_takes_the_lowest_id_among_the_greatest(how):
    row = np.zeros(VOCAB, np.float32)
    row[[9, 5, 30]] = 2.0
    assert Chooser(how, SamplingParams(temperature=0.0)).sample(row, np.array([1], np.int32), 1) == (5, None)
    # Whatever filters come along: greedy is greedy.
    params = SamplingParams(temperature=1e-6, top_k=3, top_p=0.1, min_p=0.9)
    assert Chooser(how, params).sample(row, np.array([1], np.int32), 1)[0] == 5


def test_sampling_leaves_the_row_unchanged(how):
    row = random_row()
    before = row.copy()
    params = SamplingParams(top_k=5, top_p=0.9, min_p=0.01, logit_bias={2: 3.0}, repetition_penalty=1.2, logprobs=3)
    Chooser(how, params).sample(row, np.array([1, 2], np.int32), 1)
    np.testing.assert_array_equal(row, before)


def expected_distribution(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Float64, in the documented order: temperature, min-p, top-k, top-p, each on the renormalised rest."""
    p = np.exp((row.astype(np.float64) - row.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    keep = int(np.searchsorted(np.cumsum(p[order]), params.top_p - 1e-12)) + 1
    p[order[keep:]] = 0
    return p / p.sum()


DISTRIBUTIONS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=6),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.2, top_p=0.7),
    SamplingParams(temperature=1.2, min_p=0.2),
    SamplingParams(temperature=2.0, min_p=0.05, top_k=12, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=10**7),
]


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=repr)
@pytest.mark.parametrize("size", [VOCAB, 700])
def test_tokens_follow_the_filtered_distribution(how, params, size):
    """Chi-square over 3000 positions of one request with a fixed seed; excluded tokens never come."""
    draws = 3000
    row = random_row(3, size)
    wants = np.repeat(sampler(params.replace(seed=11), vocab_size=size).row, draws)
    wants["position"] = np.arange(draws)
    tokens = choose(how, row[None], wants, None).token_ids
    counts = np.bincount(tokens, minlength=size)
    expected = draws * expected_distribution(row, params)
    assert counts[expected == 0].sum() == 0
    # Cells of fewer than 5 expected draws are pooled.
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(wanted.size - 1, 1)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 8


def test_the_token_is_a_function_of_seed_sample_index_and_position(how):
    row = np.zeros(5000, np.float32)
    tokens = np.zeros(10, np.int32)

    def draw(seed: int | None, sample_index: int, position: int) -> int:
        params = SamplingParams(seed=seed)
        return Chooser(how, params, sample_index=sample_index).sample(row, np.resize(tokens, position), 1)[0]

    assert draw(4, 0, 10) == draw(4, 0, 10)
    assert len({draw(4, 0, 10), draw(5, 0, 10), draw(4, 1, 10), draw(4, 0, 11)}) == 4
    assert draw(None, 0, 10) == draw(0, 0, 10)


def test_logprobs_are_of_the_raw_logits(how):
    row = random_row(1)
    params = SamplingParams(temperature=0.3, logit_bias={6: 100.0}, logprobs=4, top_k=2)
    token, logprobs = Chooser(how, params).sample(row, np.array([1], np.int32), 1)
    assert token == 6
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    order = np.argsort(-exact, kind="stable")
    assert logprobs.token_ids == [6, *order[:4].tolist()]
    np.testing.assert_allclose(logprobs.logprobs, exact[logprobs.token_ids], atol=1e-6)
    assert logprobs.ranks == [int(np.flatnonzero(order == 6)[0]) + 1, 1, 2, 3, 4]


def test_the_place_of_a_row_in_memory_changes_no_bit(how):
    """Rows of a vocabulary that is no multiple of a vector's width start at every alignment."""
    size = 4099
    row = random_row(5, size, spread=3.0)
    tokens = np.array([1, 2, 3], np.int32)
    choices = [
        SamplingParams(logprobs=5, seed=9),
        SamplingParams(logprobs=5, seed=9, top_p=0.8, min_p=0.01),
        SamplingParams(logprobs=5, seed=9, top_k=40, repetition_penalty=1.3),
    ]
    for params in choices:
        chooser = Chooser(how, params)
        expected = chooser.sample(row, tokens, 2)
        for shift in range(1, 17):
            shifted = np.empty(size + 16, np.float32)[shift : shift + size]
            shifted[:] = row
            assert chooser.sample(shifted, tokens, 2) == expected
            assert weights(shifted, 0.7).tobytes() == weights(row, 0.7).tobytes()
