"""Names, labels, buckets and sums of the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.messages import FinishReason, KVTierStats, SchedulerStats
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.stats import FinishedRequest, IterationStats
from octavo.metrics.table import METRICS, token_count_buckets
from octavo.metrics.throughput import ThroughputLog


def samples(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    """(sample name, the labels beyond model_name and engine) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            assert sample.labels.pop("engine") == "0"
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("m", 512, {"block_size": "16"})


def finished(reason: FinishReason) -> FinishedRequest:
    return FinishedRequest(
        reason=reason,
        num_prompt_tokens=10,
        num_generation_tokens=4,
        max_tokens=8,
        num_preemptions=0,
        e2e_seconds=1.0,
        n=1,
    )


def test_every_metric_of_the_table_is_shown_from_the_start(metrics: EngineMetrics) -> None:
    names = {name for name, _ in samples(metrics)}
    for metric in METRICS:
        suffix = {"counter": "_total", "histogram": "_bucket", "gauge": ""}[metric.kind]
        assert f"{metric.prefix}{metric.name}{suffix}" in names
    values = samples(metrics)
    assert values["vllm:cache_config_info", "block_size=16"] == 1
    for reason in FinishReason:
        assert values["vllm:request_success_total", f"finished_reason={reason.value}"] == 0


def test_iteration_tokens_is_a_histogram_despite_its_name(metrics: EngineMetrics) -> None:
    metrics.record(SchedulerStats(iteration_tokens=20), IterationStats())
    values = samples(metrics)
    assert values["vllm:iteration_tokens_total_bucket", "le=16.0"] == 0
    assert values["vllm:iteration_tokens_total_bucket", "le=32.0"] == 1
    assert values["vllm:iteration_tokens_total_sum", ""] == 20


def test_buckets_of_token_counts_end_at_the_context_length() -> None:
    assert token_count_buckets(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert token_count_buckets(1) == (1,)


def test_counters_add_up(metrics: EngineMetrics) -> None:
    stats = SchedulerStats(num_running=2, num_waiting=1, kv_cache_usage=0.25, prefix_cache_queries_delta=30)
    iteration = IterationStats(num_generation_tokens=3, num_prompt_tokens=30, num_cached_tokens=16)
    iteration.finished = [finished(reason) for reason in FinishReason]
    metrics.record(stats, iteration)
    metrics.record(SchedulerStats(num_running=1, prefix_cache_hits_delta=16), IterationStats(num_generation_tokens=1))
    values = samples(metrics)
    assert values["vllm:num_requests_running", ""] == 1
    assert values["vllm:num_requests_waiting", ""] == 0
    assert values["vllm:generation_tokens_total", ""] == 4
    assert values["vllm:prefix_cache_queries_total", ""] == 30
    assert values["vllm:prefix_cache_hits_total", ""] == 16
    assert values["vllm:prompt_tokens_by_source_total", "source=local_cache_hit"] == 16
    assert values["vllm:prompt_tokens_by_source_total", "source=local_compute"] == 14
    assert values["vllm:prompt_tokens_total", ""] == 30
    for reason in FinishReason:
        assert values["vllm:request_success_total", f"finished_reason={reason.value}"] == 1
    assert values["vllm:e2e_request_latency_seconds_count", ""] == len(FinishReason)
    assert values["vllm:request_prompt_tokens_sum", ""] == 10 * len(FinishReason)
    assert values["vllm:request_decode_time_seconds_count", ""] == 0  # none of them reached a token


def test_tokens_from_tiers_are_a_source_of_their_own(metrics: EngineMetrics) -> None:
    tiers = {"host": KVTierStats(usage=0.5, loaded_bytes_delta=7, stored_bytes_delta=9)}
    stats = SchedulerStats(external_prefix_cache_queries_delta=20, external_prefix_cache_hits_delta=16, kv_tiers=tiers)
    iteration = IterationStats(num_prompt_tokens=40, num_cached_tokens=36, num_external_tokens=16)
    metrics.record(stats, iteration)
    metrics.record(stats, IterationStats())
    values = samples(metrics)
    assert values["vllm:external_prefix_cache_queries_total", ""] == 40
    assert values["vllm:external_prefix_cache_hits_total", ""] == 32
    sources = {"local_cache_hit": 20, "external_kv_transfer": 16, "local_compute": 4}
    for source, count in sources.items():
        assert values["vllm:prompt_tokens_by_source_total", f"source={source}"] == count
    assert values["octavo:kv_tier_usage_perc", "tier=host"] == 0.5
    assert values["octavo:kv_tier_loaded_bytes_total", "tier=host"] == 14
    assert values["octavo:kv_tier_stored_bytes_total", "tier=host"] == 18
    assert values["octavo:kv_tier_stored_bytes_total", "tier=disk"] == 0


def test_negative_deltas_neither_raise_nor_decrease(metrics: EngineMetrics) -> None:
    metrics.record(SchedulerStats(prefix_cache_hits_delta=5), IterationStats(num_prompt_tokens=4, num_cached_tokens=9))
    metrics.record(
        SchedulerStats(prefix_cache_hits_delta=-3, num_preemptions_delta=-1),
        IterationStats(num_generation_tokens=-2, first_token_seconds=[-1.0]),
    )
    values = samples(metrics)
    assert values["vllm:prefix_cache_hits_total", ""] == 5
    assert values["vllm:prompt_tokens_cached_total", ""] == 4
    assert values["vllm:generation_tokens_total", ""] == 0
    assert values["vllm:time_to_first_token_seconds_sum", ""] == 0


def test_a_fault_in_the_metrics_stays_there(metrics: EngineMetrics, caplog: pytest.LogCaptureFixture) -> None:
    broken = IterationStats(first_token_seconds=[None])  # type: ignore[list-item]
    metrics.record(None, broken)
    metrics.record(None, broken)
    assert caplog.text.count("metrics are incomplete") == 1


def test_throughput_line() -> None:
    now = [0.0]
    log = ThroughputLog(clock=lambda: now[0])
    assert log.line() is None
    stats = SchedulerStats(num_running=3, kv_cache_usage=0.5, prefix_cache_queries_delta=40, prefix_cache_hits_delta=10)
    log.record(stats, IterationStats(num_prompt_tokens=100, num_generation_tokens=50))
    now[0] = 10.0
    assert log.line() == (
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 3 reqs, Waiting: 0 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 25.0%"
    )
    log.record(SchedulerStats(), IterationStats())
    now[0] = 20.0
    assert "Running: 0 reqs" in (log.line() or "")  # one line says that it is over
    assert log.line() is None


def test_every_metric_has_its_row_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    for metric in METRICS:
        name = metric.prefix + metric.name + ("_total" if metric.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{name}` | {metric.kind} | {labels} | {metric.help.rstrip('.')} |" in page
