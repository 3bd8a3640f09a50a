"""The metrics of one engine, in a registry of its own.

Updates never raise into the serving path and never decrease a counter. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from octavo.messages import SchedulerStats
from octavo.metrics.stats import FinishedRequest, IterationStats
from octavo.metrics.table import (
    FINISHED_REASONS,
    KV_TIERS,
    METRICS,
    PROMPT_TOKEN_SOURCES,
    REJECTION_REASONS,
    WAITING_REASONS,
    Metric,
    token_count_buckets,
)

TIER_NUMBERS = ("usage_perc", "loaded_bytes", "stored_bytes")

logger = logging.getLogger(__name__)


class EngineMetrics:
    """All of ``table.METRICS`` for one engine, labelled ``model_name`` and ``engine``.

    ``cache_info`` becomes the labels of ``cache_config_info``; ``tenants`` are all values of the label ``tenant``.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_info: Mapping[str, str],
        engine: str = "0",
        tenants: tuple[str, ...] = ("other",),
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            extra = tuple(cache_info) if metric.name == "cache_config_info" else metric.labels
            self._metrics[metric.name] = self._make(metric, extra, max_model_len)
        self._metrics["cache_config_info"].labels(**self._labels, **cache_info).set(1)
        self._reasons = self._children("request_success", "finished_reason", FINISHED_REASONS)
        self._sources = self._children("prompt_tokens_by_source", "source", PROMPT_TOKEN_SOURCES)
        self._waiting_reasons = self._children("num_requests_waiting_by_reason", "reason", WAITING_REASONS)
        self._rejections = self._children("admission_rejections", "reason", REJECTION_REASONS)
        self._tenant_prompts = self._children("tenant_prompt_tokens", "tenant", tenants)
        self._tenant_outputs = self._children("tenant_generation_tokens", "tenant", tenants)
        self._accepted = self._children("spec_decode_num_accepted_tokens_per_pos", "position", ("0",))
        by_tier = [self._children(f"kv_tier_{what}", "tier", KV_TIERS) for what in TIER_NUMBERS]
        self._tiers = {tier: [children[tier] for children in by_tier] for tier in KV_TIERS}
        self._num_deferred = 0  # of the waiting, by the last report
        self._plain = {m.name: self._metrics[m.name].labels(**self._labels) for m in METRICS if self._is_plain(m)}
        self._failed = False

    @staticmethod
    def _is_plain(metric: Metric) -> bool:
        return not metric.labels and metric.name != "cache_config_info"

    def _make(self, metric: Metric, extra: tuple[str, ...], max_model_len: int) -> Any:
        names = (*self._labels, *extra)
        common: dict[str, Any] = {"labelnames": names, "registry": self.registry}
        if metric.kind == "histogram":
            common["buckets"] = metric.buckets or token_count_buckets(max_model_len)
        kind = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}[metric.kind]
        return kind(metric.prefix + metric.name, metric.help, **common)

    def _children(self, name: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
        """Every value of the label exists from the start, at zero."""
        return {value: self._metrics[name].labels(**self._labels, **{label: value}) for value in values}

    def record(self, stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """Take in one message from the core. A fault in here is logged once and costs no request anything."""
        if stats is not None:
            self._guarded(self._record_scheduler, stats)
        self._guarded(self._record_iteration, iteration)
        for request in iteration.finished:
            self._guarded(self._record_finished, request)

    def _guarded(self, update: Callable[[Any], None], news: Any) -> None:
        try:
            update(news)
        except Exception as error:
            if not self._failed:
                logger.error("metrics are incomplete from now on", exc_info=error)
            self._failed = True

    def set_requests(self, running: int, waiting: int) -> None:
        """The two gauges of requests, for a front end that knows better than the last report."""
        self._plain["num_requests_running"].set(running)
        self._plain["num_requests_waiting"].set(waiting)
        deferred = min(self._num_deferred, waiting)
        self._waiting_reasons["capacity"].set(waiting - deferred)
        self._waiting_reasons["deferred"].set(deferred)

    def count_tenant(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Tokens computed for ``tenant``, one of those that the metrics were made for."""
        self._count(self._tenant_prompts[tenant], prompt_tokens)
        self._count(self._tenant_outputs[tenant], output_tokens)

    def count_rejection(self, reason: str) -> None:
        """A request was refused because of the limit ``reason``."""
        self._rejections[reason].inc()

    def count_restart(self) -> None:
        """A core died, and another one has come in its place."""
        self._plain["core_restarts"].inc()

    def _count(self, counter: Any, amount: float) -> None:
        if amount > 0:
            counter.inc(amount)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        plain = self._plain
        self._num_deferred = stats.num_deferred
        self.set_requests(stats.num_running, stats.num_waiting)
        plain["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        plain["kv_cache_pinned_perc"].set(stats.kv_cache_pinned)
        self._count(plain["num_preemptions"], stats.num_preemptions_delta)
        self._count(plain["prefix_cache_queries"], stats.prefix_cache_queries_delta)
        self._count(plain["prefix_cache_hits"], stats.prefix_cache_hits_delta)
        if stats.kv_tiers:
            self._count(plain["external_prefix_cache_queries"], stats.external_prefix_cache_queries_delta)
            self._count(plain["external_prefix_cache_hits"], stats.external_prefix_cache_hits_delta)
        for tier, moved in stats.kv_tiers.items():
            usage, loaded, stored = self._tiers[tier]
            usage.set(moved.usage)
            self._count(loaded, moved.loaded_bytes_delta)
            self._count(stored, moved.stored_bytes_delta)
        self._count(plain["spec_decode_num_drafts"], stats.num_drafts_delta)
        self._count(plain["spec_decode_num_draft_tokens"], stats.num_draft_tokens_delta)
        self._count(plain["spec_decode_num_accepted_tokens"], sum(stats.accepted_per_position_delta))
        for position, accepted in enumerate(stats.accepted_per_position_delta):
            self._count(self._accepted_at(str(position)), accepted)
        if stats.iteration_tokens > 0:
            plain["iteration_tokens_total"].observe(stats.iteration_tokens)

    def _accepted_at(self, position: str) -> Any:
        """The counter of a place in the draft; those behind the first one are made when a draft is right so far."""
        if position not in self._accepted:
            name = "spec_decode_num_accepted_tokens_per_pos"
            self._accepted |= self._children(name, "position", (position,))
        return self._accepted[position]

    def _record_iteration(self, iteration: IterationStats) -> None:
        plain = self._plain
        cached = min(max(iteration.num_cached_tokens, 0), iteration.num_prompt_tokens)
        self._count(plain["generation_tokens"], iteration.num_generation_tokens)
        self._count(plain["prompt_tokens"], iteration.num_prompt_tokens)
        self._count(plain["prompt_tokens_cached"], cached)
        external = min(max(iteration.num_external_tokens, 0), cached)
        self._count(self._sources["local_cache_hit"], cached - external)
        self._count(self._sources["external_kv_transfer"], external)
        self._count(self._sources["local_compute"], iteration.num_prompt_tokens - cached)
        for seconds in iteration.first_token_seconds:
            plain["time_to_first_token_seconds"].observe(max(seconds, 0.0))
        for seconds in iteration.inter_token_seconds:
            plain["inter_token_latency_seconds"].observe(max(seconds, 0.0))

    def _record_finished(self, request: FinishedRequest) -> None:
        self._count(self._reasons[request.reason.value], 1)
        values = {
            "e2e_request_latency_seconds": request.e2e_seconds,
            "request_queue_time_seconds": request.queue_seconds,
            "request_prefill_time_seconds": request.prefill_seconds,
            "request_decode_time_seconds": request.decode_seconds,
            "request_inference_time_seconds": request.inference_seconds,
            "request_time_per_output_token_seconds": request.seconds_per_output_token,
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_generation_tokens": request.num_generation_tokens,
            "request_params_max_tokens": request.max_tokens,
            "request_params_n": request.n,
            "request_max_num_generation_tokens": request.max_num_generation_tokens,
            "request_prefill_kv_computed_tokens": request.num_computed_prompt_tokens,
            "request_num_preemptions": request.num_preemptions,
        }
        for name, value in values.items():
            if value is not None:
                self._plain[name].observe(max(value, 0))

    def render(self) -> bytes:
        """The registry in Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)
