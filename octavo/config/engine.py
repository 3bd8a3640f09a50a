"""Configuration of the engine: model, KV cache, scheduler, backend, sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.config.choices import (
    BACKENDS,
    KV_CACHE_DTYPES,
    PREFIX_INDEXES,
    SCHEDULING_POLICIES,
    Dtype,
    KVDtype,
    LogprobsMode,
)
from octavo.config.kv_events import KVEventsConfig
from octavo.config.option import MAX_SECONDS, MAX_TOKENS, check_choices, option, require
from octavo.config.speculative import SpeculativeConfig

MAX_SAMPLES = 16384  # of one prompt
MAX_GRAMMAR_BYTES = 1 << 20  # of the largest grammar that a server may allow


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how much of its context is used."""

    model: str = option(
        "smollm2-135m", "catalogue name, GGUF file, folder with safetensors, or hub id", positional=True
    )
    served_model_name: str | None = option(None, "name in the API (default: the MODEL as given)")
    dtype: Dtype = option(
        "auto", "computation type of unquantised weights; auto keeps bf16 for 16-bit checkpoints, float32 otherwise"
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + output, in tokens, e.g. 32k; auto or -1: the model's own, or what the KV cache holds if that "
        "is less (default: auto)",
        tokens=True,
        auto=True,
    )
    seed: int = option(0, "seed of requests that bring none")
    cache_dir: str | None = option(None, "where models are kept (default: $OCTAVO_CACHE or ~/.cache/octavo)")

    def __post_init__(self) -> None:
        check_choices(self)
        require(bool(self.model), "model", self.model, "a name, a file, a folder or a hub id, and not empty")
        require(
            self.max_model_len is None or 2 <= self.max_model_len <= MAX_TOKENS,
            "max_model_len",
            self.max_model_len,
            f"2..{MAX_TOKENS}",
        )
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens per KV block")
    kv_cache_memory: int | None = option(None, "bytes for KV blocks, e.g. 2GiB (default: from free memory)", size=True)
    kv_cache_dtype: str = option(
        "auto",
        "how K and V are kept: bfloat16 (auto), or int8 or fp8 with a scale per token and head; fp8 is fp8_e4m3",
        choices=KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")
    prefix_index: str = option(
        "hash",
        "how equal prefixes are found: full blocks by hashes, or single tokens in a tree (not with sliding windows)",
        choices=PREFIX_INDEXES,
    )
    swap_space: float = option(0.0, "GiB of host memory for KV blocks that the pool has no room for (0: none)")
    kv_cache_dir: str | None = option(None, "folder where KV blocks are kept beyond the life of the process")
    kv_cache_dir_size: int = option(8 << 30, "most bytes of the files there, e.g. 20GiB (default: 8GiB)", size=True)
    preemption_mode: Literal["recompute", "swap"] = option(
        "recompute", "what becomes of the KV of a request that gives way: computed again, or kept in the swap space"
    )
    max_pinned_share: float = option(
        0.25,
        "most that may be pinned of the KV blocks (0: nothing); a request of max_model_len always fits beside",
    )
    max_tenant_pinned_share: float | None = option(
        None, "most that the requests of one tenant may pin (default: half of max_pinned_share)"
    )
    kv_events_config: dict[str, Any] | None = option(
        None,
        "stream of KV events for cache-aware routers, as JSON, e.g. "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\'',
        json=True,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.block_size in (16, 32, 64, 128), "block_size", self.block_size, "16, 32, 64 or 128")
        memory = self.kv_cache_memory
        require(memory is None or 0 < memory < 2**50, "kv_cache_memory", memory, "positive, and less than 1 PiB")
        require(0 <= self.swap_space <= 2**20, "swap_space", self.swap_space, "0..1048576 GiB")
        size = self.kv_cache_dir_size
        require(0 < size < 2**50, "kv_cache_dir_size", size, "positive, and less than 1 PiB")
        require(self.kv_cache_dir != "", "kv_cache_dir", "", "a folder")
        useful = self.kv_cache_dir is None or self.enable_prefix_caching
        require(useful, "kv_cache_dir", self.kv_cache_dir, "left out without enable_prefix_caching")
        useful = not self.kv_events.enabled or self.enable_prefix_caching
        require(useful, "kv_events_config", self.kv_events_config, "left out without enable_prefix_caching")
        share, own = self.max_pinned_share, self.max_tenant_pinned_share
        require(0 <= share <= 0.9, "max_pinned_share", share, "0..0.9")
        rule = f"0..max_pinned_share ({share:g})"
        require(own is None or 0 <= own <= share, "max_tenant_pinned_share", own, rule)
        mode = self.preemption_mode
        require(mode == "recompute" or self.swap_space > 0, "preemption_mode", mode, "recompute without swap_space")

    @property
    def kv_events(self) -> KVEventsConfig:
        """``kv_events_config`` as it is in force. Raises ConfigError."""
        return KVEventsConfig.of(self.kv_events_config)

    @property
    def tenant_pinned_share(self) -> float:
        """``max_tenant_pinned_share`` as it is in force."""
        own = self.max_tenant_pinned_share
        return self.max_pinned_share / 2 if own is None else own

    @property
    def kv_dtype(self) -> KVDtype:
        """``kv_cache_dtype`` without aliases."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How a step is put together."""

    max_num_seqs: int = option(64, "most requests computed in one step")
    max_num_batched_tokens: int | None = option(
        None, "most tokens computed in one step (default: 256; 8192 if prompts are not split)", tokens=True
    )
    enable_chunked_prefill: bool = option(True, "split long prompts over several steps")
    long_prefill_token_threshold: int = option(
        0, "most prompt tokens of one request in a step (0: only the step's budget)", tokens=True
    )
    scheduling_policy: str = option(
        "fcfs",
        "who goes first: who came first, the lowest priority number (which also takes the place of others), or the "
        "tenant that has had the least service for its weight",
        choices=SCHEDULING_POLICIES,
    )
    priority_ageing: float = option(
        0.0, "seconds of age that are worth one level of priority, so that nobody waits for ever (0: never)"
    )
    longest_prefix_first: int = option(
        0, "most later requests that may start before one that waits, since more of their prompts is cached (0: none)"
    )
    pipeline_depth: int = option(1, "steps in flight: 2 schedules the next one while this one computes")
    speculative_config: SpeculativeConfig | None = option(
        None,
        "tokens to propose ahead and check in one step, as JSON, e.g. "
        '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}\'',
        json=True,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        require(1 <= self.max_num_seqs <= MAX_TOKENS, "max_num_seqs", self.max_num_seqs, f"1..{MAX_TOKENS}")
        require(
            self.max_num_seqs <= self.step_tokens <= MAX_TOKENS,
            "max_num_batched_tokens",
            self.step_tokens,
            f"at least max_num_seqs ({self.max_num_seqs}), and at most {MAX_TOKENS}",
        )
        ageing = self.priority_ageing
        require(0 <= ageing <= MAX_SECONDS, "priority_ageing", ageing, f"0..{MAX_SECONDS:g}")
        overtakes = self.longest_prefix_first
        require(0 <= overtakes <= MAX_TOKENS, "longest_prefix_first", overtakes, f"0..{MAX_TOKENS}")
        depth = self.pipeline_depth
        require(1 <= depth <= 4, "pipeline_depth", depth, "1..4")
        rule = "1 with speculative_config, since a step begins behind the tokens that the one before it accepted"
        require(depth == 1 or self.speculative_config is None, "pipeline_depth", depth, rule)
        require(
            0 <= self.long_prefill_token_threshold <= MAX_TOKENS,
            "long_prefill_token_threshold",
            self.long_prefill_token_threshold,
            f"0..{MAX_TOKENS}",
        )

    @property
    def most_speculating(self) -> int:
        """Most requests of a step that tries drafts."""
        speculative = self.speculative_config
        return 0 if speculative is None else min(speculative.disable_by_batch_size, self.max_num_seqs)

    @property
    def most_sampled(self) -> int:
        """Most tokens that a step samples."""
        if self.speculative_config is None:
            return self.max_num_seqs
        each = 1 + self.speculative_config.num_speculative_tokens
        return max(self.max_num_seqs, min(self.most_speculating * each, self.step_tokens))

    @property
    def tokens_ahead(self) -> int:
        """Most tokens of a sequence that are planned before the first of them has come back."""
        return self.pipeline_depth * self.step_tokens

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step: small by default, since no request gets a token, or is aborted, before a step ends."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(256 if self.enable_chunked_prefill else 8192, self.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Which kernels run the model."""

    backend: str = option("auto", "kernels that run the model", choices=("auto", *BACKENDS))
    threads: int | None = option(None, "compute threads (default: one per physical core)")
    weights_cache: bool = option(True, "keep packed weights beside the models, for faster starts")
    weights_cache_dir: str | None = option(None, "where packed weights are kept (default: packed/ in the cache)")

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.threads is None or 1 <= self.threads <= 256, "threads", self.threads, "1..256")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What requests may ask of sampling, and where the values come from that they do not bring."""

    max_logprobs: int = option(20, "most logprobs of a token that a request may ask for (-1: the whole vocabulary)")
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs", "what logprobs are: the model's own numbers, or those after processors, temperature and filters"
    )
    max_n: int = option(128, "most samples of one prompt (n)")
    max_bad_words: int = option(256, "most bad_words of one request")
    stream_interval: int = option(1, "least number of tokens between two outputs of a stream")
    generation_config: str = option(
        "auto",
        "default sampling parameters: auto (the model's generation_config.json, or its GGUF file's), vllm (none), or a "
        "folder with a generation_config.json",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, "default sampling parameters that come before those, as JSON, e.g. '{\"temperature\": 0.5}'", json=True
    )

    def __post_init__(self) -> None:
        check_choices(self)
        require(-1 <= self.max_logprobs <= MAX_TOKENS, "max_logprobs", self.max_logprobs, f"-1..{MAX_TOKENS}")
        require(1 <= self.max_n <= MAX_SAMPLES, "max_n", self.max_n, f"1..{MAX_SAMPLES}")
        require(0 <= self.max_bad_words <= 65536, "max_bad_words", self.max_bad_words, "0..65536")
        require(1 <= self.stream_interval <= MAX_TOKENS, "stream_interval", self.stream_interval, f"1..{MAX_TOKENS}")
        require(self.generation_config != "", "generation_config", "", "auto, vllm or a folder")


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """What happens when the engine core dies or hangs. Only servers (AsyncLLM) have a supervisor."""

    max_core_restarts: int = option(3, "restarts of a dead engine core within --core-restart-window before giving up")
    core_restart_window: float = option(300.0, "seconds over which restarts are counted")
    core_restart_backoff: float = option(
        1.0, "seconds before the second restart within the window; doubled for each further one"
    )
    core_restart_wait: float = option(60.0, "seconds that requests wait for a restarting engine core before a 503")
    step_timeout: float = option(300.0, "seconds of silence after which a busy engine core counts as hung (0: never)")

    def __post_init__(self) -> None:
        require(0 <= self.max_core_restarts <= 1000, "max_core_restarts", self.max_core_restarts, "0..1000")
        for name in ("core_restart_window", "core_restart_backoff", "core_restart_wait", "step_timeout"):
            require(0 <= getattr(self, name) <= MAX_SECONDS, name, getattr(self, name), f"0..{MAX_SECONDS:g}")


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """How much may wait in a server before further requests are refused; see docs/guides/overload-and-fairness.md."""

    max_num_queued_reqs: int | None = option(
        None, "most sequences that wait before requests are refused with 429 (default: 16 x max_num_seqs; 0: no end)"
    )
    max_num_queued_tokens: int = option(
        2**20, "most prompt tokens that wait before requests are refused with 429 (0: no end)", tokens=True
    )
    max_queue_time: float = option(0.0, "most seconds that a request waits before it is refused with 429 (0: no end)")
    generation_timeout: float = option(
        0.0, "most seconds from a request's arrival to the end of its answer; it may ask for less (0: no end)"
    )
    tenants: str | None = option(None, "TOML file with weights and limits of tenants, who are known by their keys")

    def __post_init__(self) -> None:
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_TOKENS, name, value, f"0..{MAX_TOKENS}")
        for name in ("max_queue_time", "generation_timeout"):
            require(0 <= getattr(self, name) <= MAX_SECONDS, name, getattr(self, name), f"0..{MAX_SECONDS:g}")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """What a constraint on the text may cost, and how JSON is written."""

    grammar_timeout: float = option(5.0, "most seconds that the grammar of one request may take to compile")
    max_grammar_bytes: int = option(128 << 10, "largest JSON schema, regex or grammar of a request", size=True)
    disable_any_whitespace: bool = option(False, "constrained JSON has no optional white space")
    disable_additional_properties: bool = option(
        False, "JSON objects of a schema have only the properties that it lists"
    )

    def __post_init__(self) -> None:
        require(0.01 <= self.grammar_timeout <= 600, "grammar_timeout", self.grammar_timeout, "0.01..600 seconds")
        size = self.max_grammar_bytes
        require(1 <= size <= MAX_GRAMMAR_BYTES, "max_grammar_bytes", size, "at most 1 MiB")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything one engine core needs. Paths and sizes left None are filled in by ``args.resolve``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
