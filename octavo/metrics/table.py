"""The one table of metrics. Each row: name, kind, help, extra labels, buckets. Names, labels and buckets are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.messages import FinishReason

# fmt: off
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
# fmt: on


def token_count_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``most`` (the context length)."""
    buckets, power = [], 1
    while power <= most:
        buckets += [m * power for m in (1, 2, 5) if m * power <= most]
        power *= 10
    return tuple(buckets) or (1,)


@dataclass(frozen=True, slots=True)
class Metric:
    """``buckets`` None: 1-2-5 up to the context length. ``prefix``: vLLM's for what vLLM has too."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None
    prefix: str = "vllm:"


METRICS: tuple[Metric, ...] = (
    Metric("num_requests_running", "gauge", "Requests in the running batch."),
    Metric("num_requests_waiting", "gauge", "Requests waiting to be scheduled."),
    Metric("num_requests_waiting_by_reason", "gauge", "Requests waiting, by what they wait for.", ("reason",)),
    Metric("kv_cache_usage_perc", "gauge", "Share of KV blocks in use; 1 is all of them."),
    Metric("kv_cache_pinned_perc", "gauge", "Share of KV blocks that pins hold; 1 is all of them.", prefix="octavo:"),
    Metric("num_preemptions", "counter", "Preemptions."),
    Metric("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache."),
    Metric("prefix_cache_hits", "counter", "Tokens found in the prefix cache."),
    Metric("external_prefix_cache_queries", "counter", "Tokens that the prefix cache lacked, looked up in KV tiers."),
    Metric("external_prefix_cache_hits", "counter", "Tokens found in KV tiers."),
    Metric("kv_tier_usage_perc", "gauge", "Share of a KV tier's blocks in use; 1 is all.", ("tier",), prefix="octavo:"),
    Metric("kv_tier_loaded_bytes", "counter", "Bytes loaded from a KV tier.", ("tier",), prefix="octavo:"),
    Metric("kv_tier_stored_bytes", "counter", "Bytes stored in a KV tier.", ("tier",), prefix="octavo:"),
    Metric("spec_decode_num_drafts", "counter", "Times that drafts of a request were tried."),
    Metric("spec_decode_num_draft_tokens", "counter", "Draft tokens tried."),
    Metric("spec_decode_num_accepted_tokens", "counter", "Draft tokens that were right, and all before them."),
    Metric("spec_decode_num_accepted_tokens_per_pos", "counter", "The same, by place in the draft.", ("position",)),
    Metric("prompt_tokens", "counter", "Prompt tokens processed."),
    Metric("prompt_tokens_cached", "counter", "Prompt tokens taken from a cache."),
    Metric("prompt_tokens_by_source", "counter", "Prompt tokens by where their KV came from.", ("source",)),
    Metric("generation_tokens", "counter", "Tokens generated."),
    Metric("request_success", "counter", "Requests ended, by reason.", ("finished_reason",)),
    Metric("admission_rejections", "counter", "Requests refused because too much waited, by limit.", ("reason",)),
    Metric("time_to_first_token_seconds", "histogram", "Arrival to first token.", (), TTFT_BUCKETS),
    Metric("inter_token_latency_seconds", "histogram", "Between two tokens of a request.", (), TOKEN_BUCKETS),
    Metric("request_time_per_output_token_seconds", "histogram", "Mean per request.", (), TOKEN_BUCKETS),
    Metric("e2e_request_latency_seconds", "histogram", "Arrival to end.", (), LATENCY_BUCKETS),
    Metric("request_queue_time_seconds", "histogram", "Time spent waiting.", (), LATENCY_BUCKETS),
    Metric("request_prefill_time_seconds", "histogram", "First scheduled to first token.", (), LATENCY_BUCKETS),
    Metric("request_decode_time_seconds", "histogram", "First token to last.", (), LATENCY_BUCKETS),
    Metric("request_inference_time_seconds", "histogram", "First scheduled to last token.", (), LATENCY_BUCKETS),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request."),
    Metric("request_generation_tokens", "histogram", "Tokens generated for a request."),
    Metric("request_max_num_generation_tokens", "histogram", "Tokens of a request's longest sample."),
    Metric("request_prefill_kv_computed_tokens", "histogram", "Prompt tokens of a request that no cache supplied."),
    Metric("request_num_preemptions", "histogram", "Preemptions of a request.", (), N_BUCKETS),
    Metric("request_params_max_tokens", "histogram", "max_tokens of a request."),
    Metric("request_params_n", "histogram", "n of a request.", (), N_BUCKETS),
    Metric("iteration_tokens_total", "histogram", "Tokens computed in one step.", (), ITERATION_BUCKETS),
    Metric("core_restarts", "counter", "Times that a dead engine core was replaced.", prefix="octavo:"),
    Metric("tenant_prompt_tokens", "counter", "Prompt tokens, by tenant.", ("tenant",), prefix="octavo:"),
    Metric("tenant_generation_tokens", "counter", "Tokens generated, by tenant.", ("tenant",), prefix="octavo:"),
    Metric("cache_config_info", "gauge", "The KV cache's configuration, as labels; always 1."),
)

REJECTION_REASONS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_queue_time",
    "timeout",
    "grammars",
    "tenant_max_queued",
    "tenant_tokens_per_minute",
)
WAITING_REASONS = ("capacity", "deferred")
FINISHED_REASONS = tuple(reason.value for reason in FinishReason)
KV_TIERS = ("host", "disk")
PROMPT_TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
