"""The executor's contract, as the engine core sees it. Imports neither numpy nor torch."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from octavo.messages import KVTierInfo, MemoryPlan, ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Owns the workers. Life: load_model, plan_memory, initialize_kv_cache, execute_model..., shutdown."""

    def load_model(self) -> None:
        """Read weights. Raises ModelError."""
        ...

    def plan_memory(self, front_end_bytes: int = 0) -> MemoryPlan:
        """What the engine will take, and how many KV blocks that leaves. Valid after load_model.

        ``front_end_bytes``: what octavo's processes take already, this one aside. Raises ConfigError, with the numbers
        and what to change, if it does not fit.
        """
        ...

    def initialize_kv_cache(self, plan: MemoryPlan) -> None:
        """Prepare the program and allocate the blocks of ``plan`` (block 0 is the null block)."""
        ...

    def open_kv_tiers(self) -> dict[str, KVTierInfo]:
        """Open the tiers behind the KV pool, by name. Valid once, after initialize_kv_cache. Raises ConfigError."""
        ...

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Compile a grammar beside the steps, once however often it is asked for. Never waits.

        When the future is done a request with this grammar can start; if it failed, that request will. Grammars not
        asked for in a while are forgotten.
        """
        ...

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step. Plans run in the order given. The future holds the result or the exception that ended it."""
        ...

    def describe(self) -> dict[str, str]:
        """Facts for the start-up screen: kernels, threads, weights format and bytes."""
        ...

    def shutdown(self) -> None:
        """Release workers; idempotent."""
        ...
