"""Statistics against hand-computed values, datasets against their description."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.datasets import LOWEST_ID, DatasetConfig, make_dataset
from octavo.bench.figures import RequestRecord, peak_concurrency, summarise
from octavo.bench.load import arrival_times
from octavo.exceptions import ConfigError


def record(sent: float, *arrivals: float, prompt: int = 10) -> RequestRecord:
    return RequestRecord(sent, prompt, len(arrivals), list(arrivals))


def test_a_run_of_two_answers_and_a_failure() -> None:
    runs = [record(0.0, 1.0, 1.5, 2.5), record(1.0, 1.25), RequestRecord(0.5, 10, error="HTTP 500")]
    got = summarise(runs, duration=4.0, percentiles=(50, 99))
    assert got["completed"] == 2
    assert got["failed"] == 1
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (20, 4)
    assert got["request_throughput"] == 0.5
    assert got["output_throughput"] == 1.0
    assert got["total_token_throughput"] == 6.0
    assert got["mean_ttft_ms"] == pytest.approx(625)
    assert got["median_ttft_ms"] == pytest.approx(625)
    assert got["std_ttft_ms"] == pytest.approx(375)
    assert got["p99_ttft_ms"] == pytest.approx(250 + 0.99 * 750)  # linear between the two
    assert got["mean_tpot_ms"] == pytest.approx(750)  # the answer of one token has none
    assert got["mean_itl_ms"] == pytest.approx(750)
    assert got["p50_e2el_ms"] == pytest.approx((2500 + 250) / 2)
    assert got["max_concurrent_requests"] == 2


def test_nothing_succeeded() -> None:
    got = summarise([RequestRecord(0.0, 1, error="x")], duration=1.0)
    assert got["completed"] == 0
    assert got["output_throughput"] == 0
    assert got["mean_ttft_ms"] is None
    assert got["p99_itl_ms"] is None


def test_only_the_metrics_asked_for() -> None:
    got = summarise([record(0.0, 1.0, 2.0)], 2.0, metrics=("itl",), percentiles=(99.9,))
    assert got["p99.9_itl_ms"] == pytest.approx(1000)
    assert not any("ttft" in name for name in got)


def test_answers_one_after_another_are_not_concurrent() -> None:
    assert peak_concurrency([record(0.0, 1.0), record(1.0, 2.0), record(2.5, 3.0)]) == 1


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=50).map(sorted))
def test_gaps_add_up_to_the_time_after_the_first_token(arrivals: list[float]) -> None:
    one = record(0.0, *arrivals)
    assert sum(one.itl) == pytest.approx(one.e2el - one.ttft)
    assert len(one.itl) == one.output_tokens - 1
    assert one.tpot == pytest.approx(statistics.mean(one.itl))


def test_the_seed_decides() -> None:
    for name in ("random", "sharegpt-like", "prefix-repetition"):
        config = DatasetConfig(name=name, num_prompts=5, seed=1)
        assert make_dataset(config) == make_dataset(config)
        assert make_dataset(config) != make_dataset(DatasetConfig(name=name, num_prompts=5, seed=2))


@given(st.integers(1, 200), st.integers(1, 50), st.floats(0, 0.99))
def test_random_lengths_stay_in_their_range(mean_in: int, mean_out: int, ratio: float) -> None:
    for request in make_dataset(
        DatasetConfig(num_prompts=8, input_len=mean_in, output_len=mean_out, range_ratio=ratio)
    ):
        assert max(1, math.ceil(mean_in * (1 - ratio))) <= len(request.prompt) <= mean_in * (1 + ratio)
        assert max(1, math.ceil(mean_out * (1 - ratio))) <= request.output_len <= mean_out * (1 + ratio)
        assert all(LOWEST_ID <= token < 32_000 for token in request.prompt)


def test_sharegpt_like_has_the_medians_it_claims() -> None:
    requests = make_dataset(DatasetConfig(name="sharegpt-like", num_prompts=4000))
    assert statistics.median(len(request.prompt) for request in requests) == pytest.approx(60, rel=0.1)
    assert statistics.median(request.output_len for request in requests) == pytest.approx(180, rel=0.1)
    assert all(4 <= len(request.prompt) <= 1024 and 4 <= request.output_len <= 1024 for request in requests)


def test_prefixes_repeat_and_suffixes_do_not() -> None:
    config = DatasetConfig(name="prefix-repetition", num_prompts=6, prefix_len=20, suffix_len=7, num_prefixes=2)
    requests = make_dataset(config)
    assert [len(request.prompt) for request in requests] == [27] * 6
    assert len({request.prompt[:20] for request in requests}) == 2
    assert requests[0].prompt[:20] == requests[2].prompt[:20]
    assert len({request.prompt[20:] for request in requests}) == 6


@pytest.mark.parametrize("wrong", [{"name": "sonnet"}, {"range_ratio": 1.0}, {"vocab_size": 1000}])
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_dataset(DatasetConfig(**wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    times = arrival_times(20_000, 5.0, burstiness, seed=3)
    assert times[0] == 0
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]
    with pytest.raises(ConfigError, match="request-rate"):
        arrival_times(3, 0, 1.0, 0)
