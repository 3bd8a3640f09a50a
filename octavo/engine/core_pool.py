"""CorePool: the engine cores behind a front end, one or many. One of them computes each request.

    submit ── the core with the fewest live sequences ──▶ its Gate ──▶ its client ~~▶ core process
    on_outputs ◀── each message, its gauges summed over the cores ◀── its client ◀~~
    a core dies ──▶ its Supervisor starts another one; its Recovery ends its requests or has them computed again

The death of a core concerns its own requests only; the pool is dead when every core is. Knows nothing of text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from octavo.config import EngineConfig
from octavo.engine.core_client import AsyncCoreClient
from octavo.engine.gate import Gate
from octavo.engine.live_request import LiveRequest
from octavo.engine.quarantine import Quarantine
from octavo.engine.recovery import Recovery
from octavo.engine.supervisor import Supervisor
from octavo.exceptions import EngineDeadError, EngineRestartingError, OctavoError, RequestError
from octavo.messages import (
    Answer,
    EngineCoreOutputs,
    EngineInfo,
    KVTierStats,
    Query,
    RequestFault,
    SchedulerStats,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What a pool tells its front end, at once and on the event loop.

    ``on_outputs`` takes in a message and returns the ids that the core which sent it must abort; it does not raise.
    ``end`` ends a request: its stream raises an error of that class. ``on_death``: a core has gone, and its requests
    have been sorted out. ``on_restart``: another one is there, and is about to get those that are computed again.
    """

    on_outputs: Callable[[EngineCoreOutputs], Sequence[str]]
    end: Callable[[LiveRequest, type[OctavoError], RequestFault], None]
    on_death: Callable[[], None]
    on_restart: Callable[[], None]


class PooledCore:
    """One core of a pool, and the requests that it is to answer. After a death another process is the same core.

    ``stats``: its last report. ``num_seats``: sequences that it has begun with; while it restarts, those that had
    begun keep their seats. ``num_seqs`` and ``num_prompt_tokens``: the load, of requests that have not ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: AsyncCoreClient,
        info: EngineInfo,
        front: FrontEnd,
        quarantine: Quarantine,
        clock: Callable[[], float],
    ) -> None:
        self.stats = SchedulerStats()
        self.num_seats = self.num_seqs = self.num_prompt_tokens = 0
        self.closing = False  # told to end: a death without requests is no reason for another core
        self._live: dict[LiveRequest, None] = {}  # those that have not ended, in order of arrival
        self._front, self._restart_wait = front, config.supervisor.core_restart_wait
        self.supervisor = Supervisor(config, client, info, clock)
        self.recovery = Recovery(quarantine, self._live.keys(), front.end)
        self.gate = Gate(self._send, self.recovery.release, clock)

    @property
    def client(self) -> AsyncCoreClient:
        return self.supervisor.client

    # ---- requests

    def submit(self, live: LiveRequest) -> None:
        """Have ``live`` computed, now or when the gate lets it in."""
        live.core = self
        self._live[live] = None
        self.num_seqs += live.n
        self.num_prompt_tokens += len(live.request.prompt_token_ids)
        self.gate.enter(live)

    def abort(self, live: LiveRequest) -> None:
        """Tell the core to forget ``live``."""
        self.client.submit(abort_ids=live.core_ids)

    def forget(self, live: LiveRequest) -> None:
        """``live`` has ended: nothing of it stays here, however long the core takes to come back."""
        del self._live[live]
        self.num_seqs -= live.n
        self.num_prompt_tokens -= len(live.request.prompt_token_ids)
        self.gate.leave(live)

    def _send(self, live: LiveRequest) -> None:
        """Send a request to the core; one that cannot be sent ends alone."""
        try:
            self.client.submit(live.to_submit())
            live.times_submitted += 1
        except Exception as error:
            self._front.end(live, RequestError, RequestFault.of(error, "sending it to the engine core"))

    # ---- from the core

    async def run(self) -> None:
        """Take in what the core says, and its deaths, until there is to be no other one; then end what it had."""
        try:
            while True:
                try:
                    outputs = await self.client.outputs()
                except EngineDeadError as death:
                    await self._recover(death)
                else:
                    self._process(outputs)
        except Exception as error:
            dead = error if isinstance(error, EngineDeadError) else EngineDeadError(f"the front end failed: {error!r}")
            if dead is not error:
                logger.error("%s", dead, exc_info=error)
            self.supervisor.failure = dead
            self.stats, self.num_seats = SchedulerStats(), 0
            self.recovery.end_all(EngineDeadError, RequestFault(str(dead)))

    def _process(self, outputs: EngineCoreOutputs) -> None:
        stats = outputs.stats
        if stats is not None:
            self.stats, self.num_seats = stats, stats.num_running
        abort_ids = self._front.on_outputs(outputs)
        if abort_ids:
            self.client.submit(abort_ids=abort_ids)
        if self._live:
            self.client.expect_answer()
        if self.gate.on_trial is not None:
            self.gate.heard([output.request_id for output in outputs.outputs], stats.admitted_ids if stats else ())

    async def _recover(self, death: EngineDeadError) -> None:
        """Put another core in the place of the dead one. Raises EngineDeadError if there is to be none."""
        suspect = self.gate.on_trial
        self.gate.close()
        again = self.recovery.sort_out(death, suspect)
        if self.closing and not self._live:
            raise death
        self.stats = SchedulerStats()
        self.num_seats = sum(live.num_unfinished for live in self._live if not live.waits)
        self._front.on_death()
        patience = asyncio.get_running_loop().call_later(self._restart_wait, self.recovery.refuse_waiting)
        try:
            await self.supervisor.replace(death)
        finally:
            patience.cancel()
        self._front.on_restart()
        self.gate.open(again)


class CorePool:
    """All cores of a front end, of the same ``config`` and ``info``, on one event loop.

    ``clients`` are ready. ``clock`` gives seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        clients: Sequence[AsyncCoreClient],
        info: EngineInfo,
        front: FrontEnd,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quarantine = Quarantine(config.supervisor, clock)
        self._front = front
        if len(clients) > 1:
            front = FrontEnd(self._sum_and_process, front.end, front.on_death, front.on_restart)
        self.cores = [PooledCore(config, one, info, front, self.quarantine, clock) for one in clients]
        self._gone: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        work = [work for core in self.cores for work in (self._run(core), core.supervisor.watch())]
        self._tasks = [asyncio.create_task(one) for one in work]

    # ---- what a front end asks for

    def submit(self, live: LiveRequest) -> None:
        """Give ``live`` to a core. All its samples stay there."""
        self._alive()[0].submit(live)

    def abort(self, live: LiveRequest) -> None:
        """Have the core of ``live`` forget it."""
        if live.core is not None:
            live.core.abort(live)

    async def ask(self, query: Query[Answer]) -> Answer:
        """Have every core handle ``query`` between two of its steps; one answer for all of them.

        Raises the ValidationError, RequestError or EngineDeadError of the first core if there is no answer.
        """
        asked = [core.client.ask(query) for core in self._alive()]
        if len(asked) == 1:
            return await asked[0]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        if len(errors) == len(replies):
            raise errors[0]
        return query.merge([reply for reply in replies if not isinstance(reply, BaseException)])

    def _alive(self) -> list[PooledCore]:
        """The cores that there will be, the one to be given the next request first. Raises EngineDeadError for none."""
        alive = [core for core in self.cores if core.supervisor.failure is None]
        if not alive:
            self.check()
        return sorted(alive, key=lambda core: (not core.gate.is_free, core.num_seqs, core.num_prompt_tokens))

    def check(self, patience: float = 0.0) -> None:
        """Raises EngineDeadError if there is no core for good, EngineRestartingError if there is none for now.

        A caller that can wait until ``patience`` seconds after the death of a core hears nothing before that.
        """
        errors = [error for core in self.cores if (error := core.supervisor.error(patience)) is not None]
        if len(errors) == len(self.cores):
            raise next((error for error in errors if isinstance(error, EngineRestartingError)), errors[0])

    @property
    def is_dead(self) -> bool:
        """Whether there will be no core any more."""
        return self._gone.done()

    async def gone(self) -> EngineDeadError:
        """Why there is no core any more; waits for that moment, which an orderly shutdown never brings."""
        return await asyncio.shield(self._gone)

    # ---- numbers

    @property
    def stats(self) -> SchedulerStats:
        """The gauges of all cores together, by their last reports; nothing that counts."""
        return _summed(SchedulerStats(), [core.stats for core in self.cores])

    @property
    def num_running(self) -> int:
        """Sequences in the batches, by the last reports."""
        return sum(core.stats.num_running for core in self.cores)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait in the cores, by the last reports."""
        return sum(core.stats.num_waiting for core in self.cores)

    @property
    def num_seats(self) -> int:
        """Sequences that cores have begun with, also those whose core is being restarted."""
        return sum(core.num_seats for core in self.cores)

    @property
    def pids(self) -> list[int]:
        """Process ids of the cores."""
        return [core.client.pid for core in self.cores]

    # ---- life

    async def _run(self, core: PooledCore) -> None:
        await core.run()
        failures = [one.supervisor.failure for one in self.cores]
        if None not in failures and not self._gone.done():
            self._gone.set_result(core.supervisor.failure or EngineDeadError("no engine core is left"))

    def _sum_and_process(self, outputs: EngineCoreOutputs) -> Sequence[str]:
        if outputs.stats is not None:
            stats = _summed(outputs.stats, [core.stats for core in self.cores])
            outputs = msgspec.structs.replace(outputs, stats=stats)
        return self._front.on_outputs(outputs)

    def close(self) -> None:
        """Of a core that dies from now on there is to be another one only if it had requests."""
        for core in self.cores:
            core.closing = True

    def end_all(self, kind: type[OctavoError], fault: RequestFault) -> None:
        """End every request that has not ended."""
        for core in self.cores:
            core.recovery.end_all(kind, fault)

    async def shutdown(self, *, now: bool = False) -> None:
        """End the processes; ``now``: without waiting for the step that a core computes. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for core in self.cores:
            if now:
                core.client.kill("the engine is shut down")
        await asyncio.gather(*(core.client.shutdown() for core in self.cores))


def _summed(news: SchedulerStats, reports: Iterable[SchedulerStats]) -> SchedulerStats:
    """``news``, its gauges those of all cores together, whose last ``reports`` these are."""
    reports = list(reports)
    num_blocks = sum(one.num_blocks for one in reports)
    tiers = {}
    for name in dict.fromkeys(name for one in reports for name in one.kv_tiers):
        usages = [one.kv_tiers[name].usage for one in reports if name in one.kv_tiers]
        moved = news.kv_tiers.get(name, KVTierStats())
        tiers[name] = msgspec.structs.replace(moved, usage=sum(usages) / len(usages))
    return msgspec.structs.replace(
        news,
        num_running=sum(one.num_running for one in reports),
        num_waiting=sum(one.num_waiting for one in reports),
        num_deferred=sum(one.num_deferred for one in reports),
        num_blocks=num_blocks,
        kv_cache_usage=sum(one.kv_cache_usage * one.num_blocks for one in reports) / max(1, num_blocks),
        kv_cache_pinned=sum(one.kv_cache_pinned * one.num_blocks for one in reports) / max(1, num_blocks),
        kv_tiers=tiers,
    )
