"""Worker: owns the model and its KV cache on one device; does, synchronously, what an executor asks.

Life: ``load_model``, ``plan_memory``, ``initialize_kv_cache``, then ``execute_model`` for each plan. Knows
nothing of processes, queues, scheduling or text.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future
from typing import Any

from octavo.backends.registry import make_backend
from octavo.config import EngineConfig
from octavo.exceptions import ConfigError
from octavo.kv_transfer.movers import Movers
from octavo.kv_transfer.registry import make_movers
from octavo.messages import KVTierInfo, MemoryPlan, ModelRunnerOutput, SchedulerOutput
from octavo.model_loader import LoadedModel, load_model
from octavo.platforms.base import Platform
from octavo.structured_output.bank import GrammarBank
from octavo.tokenizer import load_tokenizer
from octavo.worker.memory import make_limits, plan_memory, this_machine
from octavo.worker.model_runner import ModelRunner
from octavo.worker.spec_decode.registry import make_drafter

logger = logging.getLogger(__name__)


class Worker:
    """The Executor's verbs (``executor.base``), on the caller's thread."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        """Makes the backend. Raises ConfigError or KernelError if it does not exist here."""
        self._config, self._platform = config, platform
        self._backend = make_backend(config.backend)
        self._drafter = make_drafter(config.scheduler.speculative_config)
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._grammars: GrammarBank | None = None
        self._movers = Movers({})
        self._facts = {"kernels": self._backend.describe()}

    def load_model(self) -> None:
        """Read program and weights. Raises ModelError."""
        self._loaded = load_model(self._config.model)
        info = self._loaded.info
        self._facts["weights"] = f"{info.weights_format}, {info.weight_bytes / 2**20:.0f} MiB"

    def plan_memory(self, front_end_bytes: int = 0) -> MemoryPlan:
        """See ``Executor.plan_memory``. Valid between load_model and initialize_kv_cache."""
        if self._loaded is None:
            raise RuntimeError("plan_memory is valid between load_model and initialize_kv_cache")
        machine = this_machine(self._platform, self._platform.resident_memory() + front_end_bytes)
        plan = plan_memory(self._loaded.outline, self._backend, self._config, machine)
        if plan.refusal:
            raise ConfigError(plan.refusal)
        wanted = self._config.model.max_model_len or self._loaded.info.max_position
        if plan.max_model_len < wanted:
            how = (plan.max_model_len, wanted)
            logger.warning("max_model_len is %d instead of %d: the KV cache holds no more tokens", *how)
        return plan

    def initialize_kv_cache(self, plan: MemoryPlan) -> None:
        """Pack the weights, allocate the blocks, be ready for plans. The loaded weights are let go.

        Raises KernelError for a program the backend cannot run, ConfigError for memory that the system refuses.
        """
        if self._loaded is None:
            raise RuntimeError("load_model comes first, and initialize_kv_cache only once")
        limits = make_limits(self._loaded.program, self._config, plan.max_model_len, plan.num_blocks)
        program, weights = self._loaded.program, self._loaded.weights
        self._weights_identity = weights.identity()
        try:
            runnable = self._backend.prepare(program, weights, limits)
        except MemoryError:
            raise ConfigError(f"the system refuses the memory that was planned: {plan.explained}") from None
        self._runnable = runnable
        if weights.identity() != self._weights_identity:
            self._weights_identity = ""  # a file has changed: what was read is unknown
        self._facts["packed weights"] = f"{runnable.weight_bytes / 2**20:.0f} MiB, {runnable.weight_origin}"
        path = self._config.model.model
        self._grammars = GrammarBank(lambda: load_tokenizer(path), program.vocab_size)
        self._runner = ModelRunner(
            runnable,
            limits,
            vocab_size=program.vocab_size,
            num_kv_groups=len(program.kv_groups),
            max_model_len=plan.max_model_len,
            logprobs_mode=self._config.sampling.logprobs_mode,
            grammars=self._grammars,
            drafter=self._drafter,
            max_sampled=self._config.scheduler.most_sampled,
        )
        self._loaded = None
        self._platform.release_free_memory()

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
