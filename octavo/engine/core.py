"""EngineCore: the loop. One step reads: schedule, execute, update.

Owns the scheduler and an executor, and knows nothing of text, sockets or tensors.

    in flight (oldest first)      [plan 7 | future] [plan 8 | future]
                                      ^ step() waits for this one   ^ schedule() appends here, up to the depth
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.core.admission import GrammarReady
from octavo.core.factory import make_scheduler
from octavo.engine.kv_events import make_publisher
from octavo.exceptions import EngineDeadError
from octavo.executor.base import Executor
from octavo.kv_transfer.registry import make_planner
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    ModelRunnerOutput,
    Query,
    Reply,
    RequestFault,
    SchedulerOutput,
    SchedulerStats,
)

logger = logging.getLogger(__name__)

GRAMMAR_SECONDS = 0.002  # without other work, how long to wait for a grammar before looking for new requests
MAX_FAILED_STEPS = 3  # in a row; more, and the fault is the engine's, not a request's


@dataclass(slots=True)
class PhaseClock:
    """Names and times the phases of start-up; ``on_phase`` hears each name as the phase begins."""

    on_phase: Callable[[str], None] = lambda name: None
    clock: Callable[[], float] = time.monotonic
    phases: list[tuple[str, float]] = field(default_factory=list)
    _name: str | None = None
    _began: float = 0.0

    def begin(self, name: str) -> None:
        self.end()
        self._name, self._began = name, self.clock()
        self.on_phase(name)

    def end(self) -> None:
        if self._name is not None:
            self.phases.append((self._name, self.clock() - self._began))
            self._name = None


class EngineCore:
    """Requests in, tokens out, one step at a time. Not thread-safe.

    ``config`` is resolved (local model path); ``vocab_size`` is the width of the logits; ``front_end_bytes`` is what
    a front end in another process takes of the memory.
    ``clock`` gives the seconds of every part of the core, so that a simulator can run it.
    ``pipeline_depth`` steps may be in flight: 1 is synchronous, 2 overlaps scheduling with compute.
    ``on_scheduled`` hears how many run and wait as soon as that has changed, while the step computes: a long prompt
    takes seconds, and step()'s own stats come after it.
    Raises ModelError or ConfigError if the model cannot be loaded or does not fit into the memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_factory: Callable[[EngineConfig], Executor],
        *,
        vocab_size: int,
        phases: PhaseClock | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_scheduled: Callable[[SchedulerStats], None] = lambda stats: None,
        front_end_bytes: int = 0,
    ):
        self._clock = clock
        self._depth = config.scheduler.pipeline_depth
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._pending: list[EngineCoreOutput] = []  # outputs made between steps: aborts and refusals
        self._stats_due = False
        self._on_scheduled = on_scheduled
        self._told = (0, 0)  # running, waiting
        self._failed_steps = 0
        with contextlib.ExitStack() as undo:
            self._publisher = make_publisher(config.cache.kv_events)
            undo.callback(self._publisher.close)
            self._executor = executor_factory(config)
            undo.callback(self._executor.shutdown)
            self._start(config, vocab_size, phases or PhaseClock(clock=clock), front_end_bytes)
            undo.pop_all()

    def _start(self, config: EngineConfig, vocab_size: int, phases: PhaseClock, front_end_bytes: int) -> None:
        phases.begin("build program")
        self._executor.load_model()
        phases.begin("load weights")
        memory = self._executor.plan_memory(front_end_bytes)
        self._executor.initialize_kv_cache(memory)
        phases.end()
        self._grammars = GrammarReady(self._executor.prepare_grammar)
        self._scheduler = make_scheduler(
            config.scheduler,
            config.cache,
            memory.num_blocks,
            memory.max_model_len,
            groups=memory.kv.groups,
            requirements=[self._grammars],
            tiers=make_planner(config.cache, self._executor.open_kv_tiers(), self._clock),
            clock=self._clock,
        )
        self.info = EngineInfo(
            max_model_len=memory.max_model_len,
            vocab_size=vocab_size,
            num_blocks=memory.num_blocks,
            block_size=memory.kv.block_size,
            num_kv_groups=len(memory.kv.groups),
            kv_cache_bytes=memory.num_blocks * memory.kv.bytes_per_block,
            phases=phases.phases,
            facts=self._executor.describe(),
        )

    # ---- requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that can never run, or cannot be queued, ends with an ERROR output of the next step."""
        try:
            self._scheduler.add_request(request)
        except Exception as error:
            self.refuse(request.output_ids, RequestFault.of(error, "queueing"))

    def refuse(self, output_ids: Sequence[str], fault: RequestFault) -> None:
        """End a request that could not be taken in: the next step has an ERROR output under each of its ids."""
        self._pending += [
            EngineCoreOutput(request_id=output_id, finish_reason=FinishReason.ERROR, error=fault)
            for output_id in output_ids
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Free the blocks of these requests now; their ABORT outputs come with the next step. Unknown ids are ignored.

        A step in flight may still write to the freed blocks; that is safe, because plans run in order.
        """
        self._pending += self._scheduler.abort(request_ids)
        self._stats_due = True

    def ask(self, query: Query[Any]) -> Reply:
        """Handle ``query`` now. A fault of the query's is in the reply."""
        self._stats_due = True
        return self._scheduler.ask(query)

    @property
    def seconds_to_expiry(self) -> float | None:
        """How long, without work, until :meth:`expire_pins` may do something; None: for ever."""
        return self._scheduler.seconds_to_expiry

    def expire_pins(self) -> None:
        """Let go of the pins whose time is over; the next step tells how much is still pinned."""
        self._scheduler.expire_pins()
        self._stats_due = True

    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do or to say."""
        return bool(self._in_flight or self._pending or self._stats_due) or self._scheduler.has_requests()

    # ---- the loop

    def step(self) -> EngineCoreOutputs:
        """Fill the pipeline, finish its oldest step, and return what that gave.

        A step that raises ends one request if that is to blame, and else starts its requests anew to find out; the
        third in a row raises EngineDeadError.
        """
        self._schedule_ahead()
        if not self._in_flight:
            return self._collect(None)
        plan, future = self._in_flight.popleft()
        try:
            result = future.result()
        except Exception as error:
            self._fail_step(plan, error)
            return self._collect(None)
        self._failed_steps = 0
        return self._collect(self._scheduler.update(plan, result))

    def _schedule_ahead(self) -> None:
        while len(self._in_flight) < self._depth and self._scheduler.has_requests():
            plan = self._scheduler.schedule()
            self._pending += self._scheduler.take_failed()
            if plan.is_empty:
                if self._in_flight or self._pending or self._stats_due:
                    return  # nothing more until a step in flight ends
                if self._grammars.wait(GRAMMAR_SECONDS):
                    return  # all that wait lack a grammar
                raise EngineDeadError("the scheduler has requests but plans nothing for them")
            self._in_flight.append((plan, self._execute(plan)))
            counts = (self._scheduler.num_running, self._scheduler.num_waiting)
            if self._told != counts or plan.new_requests:
                self._told = counts
                self._on_scheduled(self._scheduler.stats())

    def _execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """The executor's future; a failure to launch is one too."""
        try:
            return self._executor.execute_model(plan)
        except Exception as error:
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed

    def _fail_step(self, plan: SchedulerOutput, error: Exception) -> None:
        """End the request that made a step raise, if that is known; void the steps that built on it."""
        self._failed_steps += 1
        logger.error("step %d failed", plan.step_id, exc_info=error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineDeadError(f"{self._failed_steps} steps in a row failed, the last with: {error}") from error
        request_ids, finished_ids = set(plan.num_scheduled_tokens), list(plan.finished_request_ids)
        while self._in_flight:
            later, future = self._in_flight.popleft()
            future.exception()  # wait for its end; its result is void
            request_ids |= set(later.num_scheduled_tokens)
            finished_ids += later.finished_request_ids
        fault = RequestFault.of(error, "running the model")
        self._pending += self._scheduler.step_failed(sorted(request_ids), finished_ids, fault)

    def _collect(self, outputs: EngineCoreOutputs | None) -> EngineCoreOutputs:
        """A step's outputs (None: no step was finished) behind those made between steps."""
        self._publisher.publish(self._scheduler.take_kv_events())
        pending, self._pending, self._stats_due = self._pending, [], False
        if outputs is None:
            return EngineCoreOutputs(outputs=pending, timestamp=self._clock(), stats=self._scheduler.stats())
        if not pending:
            return outputs
        return msgspec.structs.replace(outputs, outputs=[*pending, *outputs.outputs])

    # ---- rest

    def check_invariants(self) -> None:
        """Prove that no block is lost or shared wrongly; meant for idle moments. Raises InvariantError."""
        self._scheduler.check_invariants()

    def shutdown(self) -> None:
        """Release the executor and what listens to KV events; idempotent."""
        self._executor.shutdown()
        self._publisher.close()
