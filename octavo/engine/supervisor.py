"""Keeps an engine core running: notices that one hangs, and puts another one in the place of one that has died.

    client.outputs() raises EngineDeadError ── replace() ── back-off, start, ready
                                                        └── too often: EngineDeadError for good
    watch() kills a core that owes an answer and has been silent for ``step_timeout``; one that loads and is silent for
    so long (and for much longer than the first one was) counts as dead too

Knows nothing of requests: what becomes of those that a dead core had is for ``recovery`` to say.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable

from octavo.config import EngineConfig, SupervisorConfig
from octavo.engine.core_client import AsyncCoreClient
from octavo.exceptions import EngineDeadError, EngineRestartingError
from octavo.messages import EngineInfo
from octavo.messages.fault import one_line

logger = logging.getLogger(__name__)

LONGEST_LOOK = 5.0  # seconds between two looks of the watchdog, at most
SLOWER_START = 4.0  # times the first start's longest phase: what a phase of a later one may take at least


class RestartBudget:
    """At most ``max_core_restarts`` within a sliding window, each later than the one before. ``clock`` in seconds."""

    def __init__(self, config: SupervisorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._restarts: deque[float] = deque()

    def spend(self, death: Exception) -> float:
        """Use up one: seconds to wait before the restart after ``death``. Raises EngineDeadError if none is left."""
        config, now = self._config, self._clock()
        while self._restarts and now - self._restarts[0] > config.core_restart_window:
            self._restarts.popleft()
        before = len(self._restarts)
        if before >= config.max_core_restarts:
            often = f" (restarts in the last {config.core_restart_window:g} s: {before})" if before else ""
            raise EngineDeadError(f"{one_line(death)}{often}") from death
        self._restarts.append(now)
        return config.core_restart_backoff * 2.0 ** (before - 1) if before else 0.0


class Supervisor:
    """One core at a time, on one event loop. ``client`` is the one that is there, or is being started."""

    def __init__(
        self, config: EngineConfig, client: AsyncCoreClient, info: EngineInfo, clock: Callable[[], float]
    ) -> None:
        """``client`` is ready, and ``info`` is what it said: each successor gets a pool of the same size."""
        self.client = client
        self.phase = ""  # of the start under way
        self.failure: EngineDeadError | None = None  # why there will be no further core
        self._policy = config.supervisor
        self._config = dataclasses.replace(
            config,
            cache=dataclasses.replace(config.cache, kv_cache_memory=info.kv_cache_bytes),
            model=dataclasses.replace(config.model, max_model_len=info.max_model_len),
        )
        self._clock, self._budget = clock, RestartBudget(config.supervisor, clock)
        slowest = max((seconds for _, seconds in info.phases), default=0.0)
        limit = config.supervisor.step_timeout
        self._load_timeout = max(limit, SLOWER_START * slowest) if limit else None
        self._dead_since: float | None = None

    def error(self, patience: float = 0.0) -> EngineDeadError | None:
        """Why there is no core: for good, or (EngineRestartingError) for now, once it was gone for ``patience`` s."""
        if self.failure is not None:
            return self.failure
        if self._dead_since is not None and self._clock() - self._dead_since >= patience:
            return EngineRestartingError(f"the engine core is restarting ({self.phase or 'it has just died'})")
        return None

    async def replace(self, death: Exception) -> None:
        """Start cores until one is ready. Raises EngineDeadError, with the last cause, when the budget is used up."""
        self._dead_since = self._clock()
        cause: Exception | None = death
        while cause is not None:
            delay = self._budget.spend(cause)
            logger.error("%s; the next one starts in %g s", one_line(cause), delay)
            self.phase = "waiting to restart"
            await self.client.shutdown()
            await asyncio.sleep(delay)
            cause = await self._start()
        logger.warning("the engine core is back after %.1f s", self._clock() - self._dead_since)
        self._dead_since = None

    async def _start(self) -> Exception | None:
        """Start a core and wait until it is ready; why it is not."""
        limit, loop = self._load_timeout, asyncio.get_running_loop()
        try:
            self.client = AsyncCoreClient(self._config, self._clock)
            async with asyncio.timeout(limit) as patience:

                def on_phase(name: str) -> None:
                    self.phase = name
                    patience.reschedule(None if limit is None else loop.time() + limit)

                await self.client.ready(on_phase)
        except TimeoutError:
            return EngineDeadError(f"the engine core has been silent for {limit:g} s while it starts ({self.phase})")
        except Exception as error:
            return error
        return None

    async def watch(self) -> None:
        """Kill any core that hangs; runs for ever. Time in which this process itself stood still does not count."""
        limit = self._policy.step_timeout
        if limit == 0:
            return
        suspect: tuple[AsyncCoreClient, float] | None = None
        while True:
            await asyncio.sleep(min(limit / 4, LONGEST_LOOK))
            since = self.client.owes_since
            if self._dead_since is not None or since is None or self._clock() - since <= limit:
                suspect = None
            elif suspect == (self.client, since):  # so at the last look too, and messages were read in between
                self.client.kill(f"the engine core has not finished a step within {limit:g} s")
            else:
                suspect = (self.client, since)
