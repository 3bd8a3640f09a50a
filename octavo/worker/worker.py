"""Worker: owns the model and its KV cache on one device; does, synchronously, what an executor asks.

Life: ``load_model``, ``initialize_kv_cache``, then ``execute_model`` for each plan. Knows nothing of processes,
queues, scheduling or text.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

from octavo.backends.base import Limits
from octavo.backends.registry import make_backend
from octavo.config import EngineConfig
from octavo.exceptions import ConfigError
from octavo.kv_transfer.movers import Movers
from octavo.kv_transfer.registry import make_movers
from octavo.messages import KVCacheSpec, KVTierInfo, ModelRunnerOutput, SchedulerOutput
from octavo.model_loader import LoadedModel, load_model
from octavo.platforms.cpu import available_memory, release_free_memory
from octavo.program import Program
from octavo.structured_output.bank import GrammarBank
from octavo.tokenizer import load_tokenizer
from octavo.worker.model_runner import ModelRunner
from octavo.worker.spec_decode.drafter import max_sampled_rows
from octavo.worker.spec_decode.registry import make_drafter

# Rows of logits that a pass may hold for prompt logprobs, besides one per sequence: this many, and this many bytes.
PROMPT_ROWS = 128
PROMPT_ROW_BYTES = 48 << 20

# KV blocks take at most this much, and this share of the memory left over, when the user gives no number.
DEFAULT_KV_BYTES = 4 << 30
DEFAULT_KV_SHARE = 0.4


def default_kv_memory(*, free: int, reserved: int, wanted: int) -> int:
    """Bytes for KV blocks when nobody says how many: what could ever be used, 4 GiB, or 40 % of what is left over.

    ``free``: bytes free now; ``reserved``: bytes that weights and activations are still going to take; ``wanted``:
    bytes with which every sequence can reach its full length.
    """
    share = int(DEFAULT_KV_SHARE * (free - reserved))
    return max(0, min(DEFAULT_KV_BYTES, share, wanted))


def activation_bytes(program: Program, limits: Limits) -> int:
    """An upper estimate of a step's buffers: the four widest values at once, and the logits, in float32."""
    widths = sorted((value.width for op in program.ops for value in op.outputs if value.shape[0] == "T"), reverse=True)
    return 4 * (limits.max_tokens * sum(widths[:4]) + limits.max_rows * program.vocab_size)


class Worker:
    """The Executor's verbs (``executor.base``), on the caller's thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Makes the backend. Raises ConfigError or KernelError if it does not exist here."""
        self._config = config
        self._backend = make_backend(config.backend)
        self._drafter = make_drafter(config.scheduler.speculative_config)
        self._loaded: LoadedModel | None = None
        self._program: Program | None = None
        self._runner: ModelRunner | None = None
        self._grammars: GrammarBank | None = None
        self._movers = Movers({})
        self._facts = {"kernels": self._backend.describe()}

    def load_model(self) -> None:
        """Read program and weights. Raises ModelError."""
        self._loaded = load_model(self._config.model)
        self._program = self._loaded.program
        info = self._loaded.info
        self._facts["weights"] = f"{info.weights_format}, {info.weight_bytes / 2**20:.0f} MiB"

    def kv_cache_spec(self) -> KVCacheSpec:
        """Valid after load_model."""
        program = self._need_program()
        return KVCacheSpec(
            num_layers=program.kv_groups.layers_per_block,
            num_kv_heads=program.num_kv_heads,
            head_dim=program.head_dim,
            element_size=self._backend.kv_element_size(self._config.cache.kv_dtype),
            block_size=self._config.cache.block_size,
            scale_size=self._backend.kv_scale_size(self._config.cache.kv_dtype),
            windows=program.kv_groups.windows,
        )

    def available_kv_memory(self) -> int:
        """Bytes for KV blocks when the user gave no number. Valid between load_model and initialize_kv_cache."""
        if self._loaded is None:
            raise RuntimeError("available_kv_memory is valid between load_model and initialize_kv_cache")
        limits = self._limits(num_blocks=0)
        groups = len(self._loaded.program.kv_groups.windows)
        blocks = limits.max_seqs * limits.max_blocks_per_seq * groups + 1  # and the null block
        return default_kv_memory(
            free=available_memory(),
            reserved=self._loaded.info.weight_bytes + activation_bytes(self._loaded.program, limits),
            wanted=blocks * self.kv_cache_spec().bytes_per_block,
        )

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Pack the weights, allocate ``num_blocks`` blocks, be ready for plans. The loaded weights are let go.

        Raises KernelError for a program the backend cannot run, ConfigError for fewer than two blocks.
        """
        if self._loaded is None:
            raise RuntimeError("load_model comes first, and initialize_kv_cache only once")
        if num_blocks < 2:
            raise ConfigError(f"{num_blocks} KV blocks: at least 2 are needed (block 0 is never used)")
        limits = self._limits(num_blocks)
        program, weights = self._loaded.program, self._loaded.weights
        self._weights_identity = weights.identity()
        runnable = self._backend.prepare(program, weights, limits)
        self._runnable = runnable
        if weights.identity() != self._weights_identity:
            self._weights_identity = ""  # a file has changed: nobody knows what was read
        self._facts["packed weights"] = f"{runnable.weight_bytes / 2**20:.0f} MiB, {runnable.weight_origin}"
        path = self._config.model.model
        self._grammars = GrammarBank(lambda: load_tokenizer(path), program.vocab_size)
        self._runner = ModelRunner(
            runnable,
            limits,
            vocab_size=program.vocab_size,
            num_kv_groups=len(program.kv_groups.windows),
            max_model_len=self._max_model_len(),
            logprobs_mode=self._config.sampling.logprobs_mode,
            grammars=self._grammars,
            drafter=self._drafter,
        )
        self._loaded = None
        release_free_memory()

    def open_kv_tiers(self) -> dict[str, KVTierInfo]:
        """See ``Executor.open_kv_tiers``."""
        if self._runner is None:
            raise RuntimeError("initialize_kv_cache comes first")
        cache = self._config.cache
        weights = self._weights_identity or f"unknown {time.time_ns()} {os.getpid()}"
        facts = [weights, self._runnable.kv_identity, cache.kv_dtype, str(cache.block_size)]
        self._movers = make_movers(cache, self._runnable, "\n".join(facts))
        self._runner.set_movers(self._movers)
        return self._movers.infos()

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """See ``Executor.prepare_grammar``; from any thread, after initialize_kv_cache."""
        if self._grammars is None:
            raise RuntimeError("initialize_kv_cache comes first")
        return self._grammars.prepare(grammar)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. An exception means that every request of the plan failed; the worker can go on.

        The scheduler then names those requests in ``finished_request_ids`` of a later plan.
        """
        if self._runner is None:
            raise RuntimeError("initialize_kv_cache comes first")
        return self._runner.execute(plan)

    def close(self) -> None:
        """Nothing is asked for any more."""
        if self._grammars is not None:
            self._grammars.close()
        self._movers.close()

    def describe(self) -> dict[str, str]:
        """Facts for the start-up screen: kernels, weights, packed weights."""
        return dict(self._facts)

    def _need_program(self) -> Program:
        if self._program is None:
            raise RuntimeError("load_model comes first")
        return self._program

    def _max_model_len(self) -> int:
        return self._config.model.max_model_len or self._need_program().max_position

    def _limits(self, num_blocks: int) -> Limits:
        program, cache, scheduler = self._need_program(), self._config.cache, self._config.scheduler
        prompt_rows = max(1, min(PROMPT_ROWS, PROMPT_ROW_BYTES // (4 * program.vocab_size)))
        return Limits(
            max_tokens=scheduler.step_tokens,
            max_rows=max_sampled_rows(scheduler.max_num_seqs, scheduler.step_tokens, self._drafter) + prompt_rows,
            max_seqs=scheduler.max_num_seqs,
            max_blocks_per_seq=-(-self._max_model_len() // cache.block_size),
            num_blocks=num_blocks,
            block_size=cache.block_size,
            kv_dtype=cache.kv_dtype,
        )
