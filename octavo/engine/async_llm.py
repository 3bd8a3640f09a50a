"""AsyncLLM: the engine for servers. The engine core runs in its own process; this side speaks text.

    generate() -> InputProcessor -> WaitingRoom -> LiveRequest -> CorePool ~~> core process
    stream     <- OutputCollector <- OutputProcessor <- _on_outputs() <- CorePool <~~ core process

Knows nothing of HTTP, and of cores only what the pool says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

import msgspec

from octavo.config import EngineConfig, TenantTable
from octavo.engine.core_client import AsyncCoreClient
from octavo.engine.core_pool import CorePool, FrontEnd
from octavo.engine.deadlines import Deadlines
from octavo.engine.input_processor import InputProcessor, Prompt, parse_prompt
from octavo.engine.live_request import LiveRequest
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.outputs import RequestOutput
from octavo.engine.tenants import Tenants
from octavo.engine.waiting_room import Load, Place, WaitingRoom
from octavo.exceptions import (
    ConfigError,
    EngineDeadError,
    OctavoError,
    OverloadedError,
    QueueTimeError,
    ValidationError,
)
from octavo.messages import (
    Answer,
    CacheOptions,
    CachePin,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    Query,
    ReportOptions,
    RequestFault,
    SamplingParams,
    SchedulingOptions,
    Tenant,
)
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.service_rate import ServiceRate
from octavo.metrics.stats import IterationStats
from octavo.metrics.throughput import ThroughputLog
from octavo.structured_output.check_queue import CheckQueue
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0


def _ready_tokenizer(path: str) -> Tokenizer:
    """The tokenizer, its chat template compiled: else the first conversation would pay for that."""
    tokenizer = load_tokenizer(path)
    with contextlib.suppress(ValidationError):  # there is no template, or it wants other messages
        tokenizer.apply_chat_template([{"role": "user", "content": ""}])
    return tokenizer


Options = TypeVar("Options", SchedulingOptions, CacheOptions, ReportOptions)


def _given_once(parameter: str, given: Options | None, by_name: Options) -> Options:
    """Options as a struct, or by the names of their fields. Raises ValidationError if both say something."""
    if given is None:
        return by_name
    if by_name != type(by_name)():
        raise ValidationError(f"{parameter} and the keywords that it stands for are both given", parameter=parameter)
    return given


class AsyncLLM:
    """Streams of tokens for many callers at once, on one event loop. Made by :meth:`create`.

    ``num_running`` is the number of sequences in the core's batch, by its last report; ``num_waiting`` all others
    that this side has not seen end, so that it is right between reports too; ``num_active`` the requests whose
    streams are open on this side.
    """

    def __init__(
        self,
        config: EngineConfig,
        clients: Sequence[AsyncCoreClient],
        tokenizer: Tokenizer,
        info: EngineInfo,
        tenants: TenantTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clients`` hold cores that are ready, all with this ``info``. ``clock``: seconds, as in arrival times."""
        self.info = info
        self.tokenizer = tokenizer
        name = config.model.served_model_name or os.path.basename(config.model.model)
        cache_info = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),  # vLLM's name; here they are in main memory
            "enable_prefix_caching": str(config.cache.enable_prefix_caching),
            "kv_cache_memory_bytes": str(info.kv_cache_bytes),
        }
        self._clock = clock
        self._live: dict[LiveRequest, None] = {}  # those whose streams are open
        front = FrontEnd(self._on_outputs, self._end, self._on_death, self._on_restart)
        self._pool = CorePool(config, clients, info, front, clock)
        self._restart_wait = config.supervisor.core_restart_wait
        self._input = InputProcessor(tokenizer, info, config, clock)
        self._checks = CheckQueue(self._input.grammars)
        self._output = OutputProcessor(tokenizer, clock)
        self._stream_interval = config.sampling.stream_interval
        self._rate = ServiceRate(len(clients))
        self._tenants = Tenants(tenants or TenantTable(), clock)
        self.metrics = EngineMetrics(name, info.max_model_len, cache_info, tenants=self._tenants.labels)
        self._deadlines = Deadlines(config.queue, clock)
        seats = len(clients) * config.scheduler.max_num_seqs
        self._room = WaitingRoom(config.queue, seats, self._rate, self._tenants, self._count_refusal)
        self._numbers = itertools.count()
        self._closing = False
        self._drained = asyncio.Event()
        self._throughput = ThroughputLog(clock=clock)
        self._logging = asyncio.create_task(self._log())

    @classmethod
    async def create(
        cls,
        config: EngineConfig,
        on_phase: Callable[[str], None] | None = None,
        *,
        tenants: TenantTable | None = None,
        num_cores: int = 1,
    ) -> AsyncLLM:
        """Start the core processes for a resolved ``config`` (local model path) and wait until they are ready.

        ``on_phase`` is called with the name of each start-up phase as it begins, on the event loop. The tokenizer is
        read meanwhile. Several cores need ``kv_cache_memory``, which each of them takes: free memory would go to the
        first. Raises ModelError, ConfigError or EngineDeadError.
        """
        if num_cores > 1 and config.cache.kv_cache_memory is None:
            raise ConfigError(f"{num_cores} engine cores share the memory: kv_cache_memory must say what each takes")
        clients: list[AsyncCoreClient] = []
        try:
            clients.extend(AsyncCoreClient(config) for _ in range(num_cores))
            reading = asyncio.to_thread(_ready_tokenizer, config.model.model)
            ready = [client.ready(None if number else on_phase) for number, client in enumerate(clients)]
            tokenizer, infos = await asyncio.gather(reading, asyncio.gather(*ready))
            return cls(config, clients, tokenizer, infos[0], tenants)
        except BaseException:
            await asyncio.gather(*(client.shutdown() for client in clients))
            raise

    # ---- requests

    async def check_constraint(self, params: SamplingParams) -> None:
        """Compile what constrains the text, off the event loop, so that :meth:`generate` finds it known.

        Raises ValidationError naming the field if it makes no sense or costs too much, OverloadedError if too many
        others wait for the same, and RequestError.
        """
        constraint = params.structured_outputs
        if constraint is None:
            return
        try:
            await self._checks.check(constraint)
        except OverloadedError as error:
            self._count_refusal(error.reason)
            raise

    def check_queue(self, tenant: str = "") -> None:
        """Raises OverloadedError if no request at all of ``tenant`` would be taken in now."""
        self._room.check(tenant)

    def bound(self, params: SamplingParams, scheduling: SchedulingOptions, *, explicit: bool) -> SamplingParams:
        """``params`` within what the tenant may ask for; see ``engine.tenants``. Raises ValidationError."""
        return self._tenants.bound(params, scheduling, explicit=explicit)

    def set_tenants(self, table: TenantTable) -> None:
        """What tenants may have from now on. Those that the engine was not made with are ``other`` in the metrics."""
        self._tenants.replace(table)

    def reserve(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        scheduling: SchedulingOptions = SchedulingOptions(),
    ) -> list[Place]:
        """Places in the queue for all prompts (token ids) of one request, to be given to :meth:`generate`.

        Raises OverloadedError if they do not fit together, or could not even begin within the request's timeout.
        """
        most, tenant = self.info.max_model_len, scheduling.tenant.name
        loads = [Load.of(len(ids), one, most, tenant) for ids, one in zip(prompts, params, strict=True)]
        return self._room.enter(loads, self._deadlines.timeout(scheduling.timeout))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        timeout: float | None = None,
        cache_pins: Sequence[CachePin] = (),
        wants_cache_report: bool = False,
        scheduling: SchedulingOptions | None = None,
        cache: CacheOptions | None = None,
        report: ReportOptions | None = None,
        arrival_time: float | None = None,
        place: Place | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check the request now, and return its stream; it is submitted when iteration begins.

        A prompt is text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` (and ``cache_salt``).
        Raises ValidationError, OverloadedError (unless it has a ``place``), EngineDeadError, and DeadlyRequestError for
        what the core has died of, at the call. The iterator raises RequestError if a sequence fails while it runs,
        ValidationError if that is for something it asks in vain, EngineDeadError if the core dies in the middle of the
        answer, and EngineRestartingError if it has not come back in time. Closing or cancelling the iterator aborts the
        request.
        ``scheduling``, ``cache`` and ``report`` stand for the keywords from ``priority`` to ``wants_cache_report``:
        ValidationError if both say something. ``timeout`` seconds after ``arrival_time`` (``time.monotonic()``,
        default: now) the iterator raises DeadlineError, or QueueTimeError if the request has not begun.
        ``place`` comes from :meth:`reserve`, called with the same ``scheduling``. ``request_id`` is only echoed and may
        repeat. Text is tokenised here, with special tokens; pass token ids to choose otherwise. A consumer slower than
        the engine gets several steps' outputs as one. ``cache_pins``, shortest first, are set as far as the tenant's
        quota goes.
        """
        self._check_alive()
        by_name = SchedulingOptions(priority=priority, tenant=Tenant(tenant), timeout=timeout)
        scheduling = _given_once("scheduling", scheduling, by_name)
        cache = _given_once("cache", cache, CacheOptions(salt=cache_salt, pins=tuple(cache_pins)))
        report = _given_once("report", report, ReportOptions(cache_miss=wants_cache_report))
        parsed = parse_prompt(prompt)
        if cache.salt is None and parsed.cache_salt is not None:
            cache = msgspec.structs.replace(cache, salt=parsed.cache_salt)
        request = self._input.process(
            parsed.prompt,
            sampling_params,
            scheduling=scheduling,
            cache=cache,
            report=report,
            arrival_time=arrival_time,
        )
        self._pool.quarantine.check(request)
        external_id = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if place is None:
            (place,) = self.reserve([request.prompt_token_ids], [request.sampling_params], scheduling)
        request = msgspec.structs.replace(request, scheduling=self._limited(scheduling))
        return self._stream(external_id, parsed.text, request, place)

    def _limited(self, scheduling: SchedulingOptions) -> SchedulingOptions:
        """``scheduling`` with the limits of its tenant, and a timeout within the server's."""
        tenant, timeout = self._tenants.tenant(scheduling.tenant.name), self._deadlines.timeout(scheduling.timeout)
        return msgspec.structs.replace(scheduling, tenant=tenant, timeout=timeout)

    async def _stream(
        self, request_id: str, prompt: str | None, request: EngineCoreRequest, place: Place
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_alive()
        live = LiveRequest(
            request_id, prompt, request, self.tokenizer, stream_interval=self._stream_interval, place=place
        )
        self._live[live] = None
        live.timers = self._deadlines.watch(live, self._give_up)
        try:
            self._output.add(live)
            self._pool.submit(live)
            while not live.finished or live.collector:
                output = await live.collector.get()
                for completion in output.outputs:
                    if completion.finish_reason == FinishReason.ABORT and self._is_past(request.deadline):
                        timeout = request.scheduling.timeout or 0.0
                        raise self._noted(live, self._deadlines.late(timeout, live.waits))
                    if completion.finish_reason == FinishReason.ERROR:
                        fault = completion.fault or RequestFault("")
                        raise fault.exception(str(completion.stop_reason))
                if output.finished and FinishReason.ABORT not in [one.finish_reason for one in output.outputs]:
                    self._pool.quarantine.clear(request)
                yield output
        finally:
            self._abort(live)
            live.close()
            del self._live[live]
            if not self._live:
                self._drained.set()

    def _is_past(self, deadline: float | None) -> bool:
        return deadline is not None and self._clock() >= deadline

    def _end(self, live: LiveRequest, kind: type[OctavoError], fault: RequestFault) -> None:
        """End a request on this side: its stream raises ``kind``."""
        message = live.tell(fault)
        live.collector.fail(kind(message))
        self._note(self._output.end(live, FinishReason.ERROR, message))

    def _give_up(self, live: LiveRequest, error: OctavoError) -> None:
        """Its time is over: its stream raises ``error``, and the core forgets it. A whole answer is still read."""
        if not live.finished:
            live.collector.fail(self._noted(live, error))
            self._abort(live)

    def _noted(self, live: LiveRequest, error: OctavoError) -> OctavoError:
        """``error``, which ends a request whose time is over, counted and in the log."""
        if isinstance(error, QueueTimeError):
            self._count_refusal(error.reason)
        named = (live.request_id, live.core_ids[0], error)
        logger.warning("request %s (%s) ended: %s", *named, extra={"request_id": live.label})
        return error

    def _count_refusal(self, reason: str) -> None:
        self.metrics.count_rejection(reason)
        self._throughput.refuse(reason)

    def _abort(self, live: LiveRequest) -> None:
        """End what still runs of a request, here and in the core."""
        if not live.finished:
            self._pool.abort(live)
            self._note(self._output.end(live, FinishReason.ABORT))

    async def abort(self, request_id: str) -> None:
        """End every running request with this (external) id; their streams end with finish_reason abort."""
        for live in list(self._live):
            if live.request_id == request_id:
                self._abort(live)

    async def ask(self, query: Query[Answer]) -> Answer:
        """Have all cores handle ``query`` between two steps. Raises what ``CorePool.ask`` raises."""
        self._check_alive()
        return await self._pool.ask(query)

    @property
    def num_running(self) -> int:
        return self._pool.num_running

    @property
    def num_waiting(self) -> int:
        known = len(self._output)
        return max(known - self.num_running, min(self._pool.num_waiting, known))

    @property
    def num_active(self) -> int:
        return len(self._live)

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the engine cores."""
        return self._pool.pids

    # ---- from the pool

    def _on_outputs(self, outputs: EngineCoreOutputs) -> Sequence[str]:
        """Take in what a core has computed; ids of its sequences that it must abort. Never raises."""
        if outputs.stats is not None:
            self._room.num_running = self._pool.num_seats
            self._output.begun(outputs.stats.admitted_ids)
        processed = self._output.process(outputs)
        self._rate.record(outputs, processed.iteration)
        for name, (prompt_tokens, output_tokens) in processed.iteration.tenant_tokens.items():
            self._tenants.use(name, output_tokens)
            self.metrics.count_tenant(self._tenants.label(name), prompt_tokens, output_tokens)
        self.metrics.record(outputs.stats, processed.iteration)
        self._throughput.record(outputs.stats, processed.iteration)
        return processed.abort_ids

    def _on_death(self) -> None:
        self._room.num_running = self._pool.num_seats
        self._throughput.record(self._pool.stats, IterationStats())

    def _on_restart(self) -> None:
        self.metrics.count_restart()
        self.metrics.record(self._pool.stats, IterationStats())

    def _note(self, iteration: IterationStats) -> None:
        self.metrics.record(None, iteration)

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(LOG_SECONDS)
            if line := self._throughput.line():
                logger.info("%s", line)

    def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self.metrics.set_requests(self.num_running, self.num_waiting)
        return self.metrics.render()

    # ---- life

    def _check_alive(self) -> None:
        if self._closing:
            raise EngineDeadError("the engine is shutting down")
        self._pool.check(patience=self._restart_wait)

    async def check_health(self) -> None:
        """Raises EngineDeadError if the core is gone, EngineRestartingError if only for now."""
        self._pool.check()

    async def gone(self) -> EngineDeadError:
        """Why there is no engine core any more; waits for that moment, which an orderly shutdown never brings."""
        return await self._pool.gone()

    async def shutdown(self, drain_seconds: float = 0.0, *, now: bool = False) -> None:
        """Refuse new requests, give running ones ``drain_seconds``, end the rest and the process. Idempotent.

        The streams of the rest raise EngineDeadError.
        A second call while the first one drains does not wait for it; ``now`` does not wait for the core's step either.
        """
        self._closing = True
        self._pool.close()
        if self._live and not self._pool.is_dead and drain_seconds > 0:
            self._drained.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), drain_seconds)
        self._pool.end_all(EngineDeadError, RequestFault("the server is shutting down; please ask again"))
        self._logging.cancel()
        self._checks.close()
        self._input.grammars.close()
        await self._pool.shutdown(now=now)
