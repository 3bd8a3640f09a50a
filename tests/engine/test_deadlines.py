"""Time-outs: waiting too long, running too long, and requests for which it is too late already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from octavo.config import QueueConfig, SchedulerConfig, TenantTable
from octavo.core.factory import make_scheduler
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.deadlines import Deadlines
from octavo.engine.tenants import Tenants
from octavo.engine.waiting_room import Load, WaitingRoom
from octavo.exceptions import DeadlineError, OverloadedError, QueueTimeError, ValidationError
from octavo.messages import (
    EngineCoreOutputs,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    SchedulingOptions,
)
from octavo.metrics.service_rate import ServiceRate
from octavo.metrics.stats import IterationStats
from tests.core.checking_worker import cache_config, make_request

from .tiny_llama import make_config

LONG = SamplingParams(max_tokens=480, ignore_eos=True, temperature=0.0)
SHORT = LONG.replace(max_tokens=3)


@pytest_asyncio.fixture
async def one_seat(tiny_model: str) -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.create(make_config(tiny_model, max_num_seqs=1))
    yield engine
    await engine.shutdown()


async def run(engine: AsyncLLM, params: SamplingParams, timeout: float | None = None) -> int:
    num_tokens = 0
    async for output in engine.generate([5, 6, 7], params, scheduling=SchedulingOptions(timeout=timeout)):
        num_tokens = len(output.outputs[0].token_ids)
    return num_tokens


async def settled(engine: AsyncLLM) -> None:
    """Nothing runs, and the core has freed all blocks."""
    while engine.num_running or engine.num_waiting or b"kv_cache_usage_perc{" not in engine.render_metrics():
        await asyncio.sleep(0.01)
    usage = [line for line in engine.render_metrics().decode().splitlines() if line.startswith("vllm:kv_cache_usage")]
    assert usage[0].endswith(" 0.0")
    assert not engine._live
    assert engine._room.num_seqs == 0


async def test_one_that_runs_too_long_ends_at_its_timeout(one_seat: AsyncLLM) -> None:
    with pytest.raises(DeadlineError, match=r"not finished within its timeout of 0\.2 s"):
        await run(one_seat, LONG.replace(n=8), timeout=0.2)
    assert await run(one_seat, SHORT, timeout=60) == 3
    await settled(one_seat)


async def test_one_that_waits_for_all_of_its_timeout_costs_nothing(one_seat: AsyncLLM) -> None:
    stream = one_seat.generate([1], LONG)
    await anext(stream)
    with pytest.raises(QueueTimeError, match=r"waited for all of its timeout of 0\.05 s; nothing was computed"):
        await run(one_seat, SHORT, timeout=0.05)
    await stream.aclose()
    assert 'reason="timeout"} 1.0' in one_seat.render_metrics().decode()
    await settled(one_seat)


async def test_what_the_core_finds_late_is_counted_too(one_seat: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end was busy, and its own timer came too late."""
    monkeypatch.setattr(one_seat._deadlines, "watch", lambda *_: [])
    stream = one_seat.generate([1], LONG)
    await anext(stream)
    late = asyncio.create_task(run(one_seat, SHORT, timeout=0.05))
    await asyncio.sleep(0.1)
    await stream.aclose()
    with pytest.raises(QueueTimeError, match="nothing was computed"):
        await late
    assert 'reason="timeout"} 1.0' in one_seat.render_metrics().decode()
    await settled(one_seat)


async def test_a_whole_answer_may_be_read_after_its_deadline(one_seat: AsyncLLM) -> None:
    delta = SHORT.replace(output_kind=RequestOutputKind.DELTA)
    stream = one_seat.generate([5, 6, 7], delta, scheduling=SchedulingOptions(timeout=1.0))
    tokens = list((await anext(stream)).outputs[0].token_ids)
    while one_seat.num_running or one_seat.num_waiting:
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.1)
    async for output in stream:
        tokens += output.outputs[0].token_ids
    assert len(tokens) == 3


async def test_the_time_counts_from_the_arrival(one_seat: AsyncLLM) -> None:
    """What was spent on it before the engine heard of it, e.g. on compiling its grammar, is part of it."""
    with pytest.raises(QueueTimeError, match="timeout of 60 s"):
        async for _ in one_seat.generate(
            [5], SHORT, scheduling=SchedulingOptions(timeout=60), arrival_time=time.monotonic() - 61
        ):
            pass
    await settled(one_seat)


async def test_the_queue_has_a_time_limit(tiny_model: str) -> None:
    engine = await AsyncLLM.create(make_config(tiny_model, max_num_seqs=1, max_queue_time=0.05))
    try:
        stream = engine.generate([1], LONG)
        await anext(stream)
        with pytest.raises(QueueTimeError, match=r"waited for 0\.05 s \(--max-queue-time\) in vain"):
            await run(engine, SHORT)
        await stream.aclose()
        assert await run(engine, SHORT) == 3
        await settled(engine)
    finally:
        await engine.shutdown()


def test_the_shorter_of_the_servers_and_the_requests_own() -> None:
    deadlines = Deadlines(QueueConfig(generation_timeout=10.0))
    assert [deadlines.timeout(own) for own in (None, 3.0, 30.0)] == [10.0, 3.0, 10.0]
    assert Deadlines(QueueConfig()).timeout(None) is None
    for odd in (0.0, -1.0, 1e7, float("inf")):
        with pytest.raises(ValidationError, match="timeout must be more than 0") as caught:
            deadlines.timeout(odd)
        assert caught.value.parameter == "timeout"


def test_a_hopeless_request_is_refused_at_the_door() -> None:
    rate, refused = ServiceRate(), list[str]()
    room = WaitingRoom(QueueConfig(), 1, rate, Tenants(TenantTable()), refused.append)
    kept = room.enter([Load(1, 1000, 10)], timeout=1.0)  # nobody is ahead
    rate.record(EngineCoreOutputs(stats=SchedulerStats(iteration_tokens=100, step_seconds=1.0)), IterationStats())
    with pytest.raises(OverloadedError, match=r"takes about 10 s .* timeout is 4 s"):
        room.enter([Load(1, 1, 1)], timeout=4.0)
    assert refused == ["timeout"]
    kept += room.enter([Load(1, 1, 1)], timeout=20.0) + room.enter([Load(1, 1, 1)])


def test_the_scheduler_does_not_start_what_is_late() -> None:
    now = [100.0]
    scheduler = make_scheduler(SchedulerConfig(max_num_seqs=1), cache_config(4), 20, 100, clock=lambda: now[0])
    for name, deadline in (("first", 500.0), ("late", 101.0), ("next", None)):
        scheduler.add_request(
            msgspec.structs.replace(make_request(name, [1, 2]), scheduling=SchedulingOptions(timeout=deadline))
        )
    assert list(scheduler.schedule().num_scheduled_tokens) == ["first"]
    now[0] = 600.0  # a request that has begun goes on: it is for the front end to end it
    scheduler.abort(["first"])
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["next"]
    assert [(one.request_id, one.finish_reason) for one in scheduler.take_failed()] == [("late", FinishReason.ABORT)]
    scheduler.abort(["next"])
    scheduler.schedule()
    scheduler.check_invariants()
    assert not scheduler.has_requests()


async def test_timers_are_cancelled(one_seat: AsyncLLM) -> None:
    began = time.monotonic()
    assert await run(one_seat, SHORT, timeout=1.5) == 3
    await asyncio.sleep(max(0.0, began + 1.6 - time.monotonic()))
    assert "request_success_total" in one_seat.render_metrics().decode()
    assert 'finished_reason="abort",model_name="tiny"} 1.0' not in one_seat.render_metrics().decode()
