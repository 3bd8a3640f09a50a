"""UniprocExecutor: the worker in this process, on one thread of its own.

The thread costs about 15 microseconds a step, and lets the engine core schedule the next step while kernels, which
release the GIL, run this one. Knows nothing of the model or of plans' contents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from octavo.config import EngineConfig
from octavo.messages import KVTierInfo, MemoryPlan, ModelRunnerOutput, SchedulerOutput
from octavo.platforms.base import Platform
from octavo.worker.worker import Worker


class UniprocExecutor:
    """See ``executor.base.Executor``. All verbs run on the worker thread, in the order they were called."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="octavo-worker", daemon=True)
        self._closed = False
        self._thread.start()
        try:
            self._worker: Worker = self._submit(lambda: Worker(config, platform)).result()
        except BaseException:
            self.shutdown()
            raise

    def load_model(self) -> None:
        self._submit(self._worker.load_model).result()

    def plan_memory(self, front_end_bytes: int = 0) -> MemoryPlan:
        plan: MemoryPlan = self._submit(lambda: self._worker.plan_memory(front_end_bytes)).result()
        return plan

    def initialize_kv_cache(self, plan: MemoryPlan) -> None:
        self._submit(lambda: self._worker.initialize_kv_cache(plan)).result()

    def open_kv_tiers(self) -> dict[str, KVTierInfo]:
        infos: dict[str, KVTierInfo] = self._submit(self._worker.open_kv_tiers).result()
        return infos

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        return self._worker.prepare_grammar(grammar)  # not on the worker thread, which may be in a long step

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._submit(lambda: self._worker.execute_model(plan))

    def describe(self) -> dict[str, str]:
        facts: dict[str, str] = self._submit(self._worker.describe).result()
        return facts

    def shutdown(self) -> None:
        """Run what was submitted before, then end the thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._tasks.put((Future(), lambda: self._worker.close()))
            self._tasks.put(None)
        self._thread.join()

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        if self._closed:
            raise RuntimeError("the executor is shut down")
        future: Future[Any] = Future()
        self._tasks.put((future, call))
        return future

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, call  # a waiting thread must not keep the last plan or result alive
