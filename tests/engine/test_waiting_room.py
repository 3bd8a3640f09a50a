"""The bounded queue: what is counted, who is refused, and what they are told."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from octavo.config import QueueConfig, TenantTable
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.tenants import Tenants
from octavo.engine.waiting_room import Load, WaitingRoom
from octavo.exceptions import OverloadedError
from octavo.messages import (
    BeamSearch,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    StructuredOutputsParams,
)
from octavo.metrics.service_rate import ServiceRate
from octavo.metrics.stats import FinishedRequest, IterationStats
from octavo.structured_output.check_queue import MAX_CHECKS

from .tiny_llama import make_config


def room(seqs: int | None = 4, tokens: int = 100, *, seats: int = 2, running: int = 2) -> tuple[WaitingRoom, list[str]]:
    refused: list[str] = []
    config = QueueConfig(max_num_queued_reqs=seqs, max_num_queued_tokens=tokens)
    made = WaitingRoom(config, seats, ServiceRate(), Tenants(TenantTable()), refused.append)
    made.num_running = running
    return made, refused


def test_all_of_a_request_or_nothing_of_it() -> None:
    waiting, refused = room()
    waiting.enter([Load(1, 10, 5)])  # dropped at once: it has left
    assert (waiting.num_seqs, waiting.num_tokens) == (0, 0)
    first = waiting.enter([Load(2, 10, 5)])
    with pytest.raises(OverloadedError, match=r"2 sequences with 10 prompt tokens, and --max-num-queued-reqs is 4"):
        waiting.enter([Load(1, 1, 1), Load(2, 1, 1)])
    assert (waiting.num_seqs, waiting.num_tokens) == (2, 10)
    second = waiting.enter([Load(1, 1, 1), Load(1, 1, 1)])
    with pytest.raises(OverloadedError):
        waiting.check()
    assert refused == ["max_num_queued_reqs"] * 2
    for place in [*first, *second, *second]:
        place.leave()
    waiting.check()
    assert (waiting.num_seqs, waiting.num_tokens) == (0, 0)


def test_tokens_are_bounded_and_an_empty_room_takes_anything() -> None:
    waiting, refused = room(seqs=0)
    large = waiting.enter([Load(16, 1000, 5)])
    with pytest.raises(OverloadedError, match="max-num-queued-tokens is 100"):
        waiting.enter([Load(1, 1, 1)])
    assert refused == ["max_num_queued_tokens"]
    large[0].leave()
    kept = waiting.enter([Load(1, 50, 1)]) + waiting.enter([Load(1, 50, 1)])
    with pytest.raises(OverloadedError):
        waiting.enter([Load(1, 1, 1)])
    del kept


def test_all_beams_of_a_search_count() -> None:
    sampled = SamplingParams(n=3, max_tokens=None)
    assert Load.of(10, sampled, 100, "a") == Load(3, 10, 270, "a")
    beams = SamplingParams(n=2, max_tokens=5, temperature=0.0, beam_search=BeamSearch(beam_width=6))
    assert Load.of(10, beams, 100, "") == Load(6, 10, 30, "")


def test_free_seats_are_no_waiting() -> None:
    waiting, _ = room(seqs=1, seats=8, running=5)
    kept = [waiting.enter([Load(1, 1, 1)]) for _ in range(4)]
    with pytest.raises(OverloadedError):
        waiting.enter([Load(1, 1, 1)])
    waiting.num_running = 4
    kept.append(waiting.enter([Load(1, 1, 1)]))


def test_the_default_is_sixteen_full_batches() -> None:
    waiting, _ = room(seqs=None, seats=2, tokens=0)
    kept = [waiting.enter([Load(1, 10**6, 1)]) for _ in range(32)]
    with pytest.raises(OverloadedError, match="--max-num-queued-reqs is 32"):
        waiting.enter([Load(1, 1, 1)])
    del kept


def step(prompt: int, sampled: int, seconds: float) -> EngineCoreOutputs:
    outputs = [EngineCoreOutput(request_id=f"r{i}", new_token_ids=[1]) for i in range(sampled)]
    stats = SchedulerStats(iteration_tokens=prompt + sampled, step_seconds=seconds)
    return EngineCoreOutputs(outputs=outputs, stats=stats)


def test_the_estimate_is_tokens_ahead_over_the_measured_rate() -> None:
    waiting, _ = room(seqs=2, tokens=10**6)
    kept = waiting.enter([Load(2, 6000, 2000)])
    with pytest.raises(OverloadedError) as unknown:
        waiting.enter([Load(1, 1, 1)])
    assert unknown.value.retry_after is None
    rate = waiting._rate
    for _ in range(40):
        rate.record(step(100, 10, 0.5), IterationStats())
    assert rate.prompt_tokens_per_second == pytest.approx(200)
    assert rate.output_tokens_per_second == pytest.approx(20)
    assert waiting.wait_seconds() == pytest.approx(100)  # 2000 output tokens at 20/s; the prompts take 30 s
    ended = FinishedRequest(FinishReason.STOP, 1, 100, 100, 0, 1.0)
    rate.record(EngineCoreOutputs(), IterationStats(finished=[ended]))  # answers are 100 tokens, not 1000
    assert waiting.wait_seconds() == pytest.approx(30)
    with pytest.raises(
        OverloadedError, match="200 prompt and 20 output tokens per second they take about 30 s"
    ) as full:
        waiting.enter([Load(1, 1, 1)])
    assert full.value.retry_after == pytest.approx(15)  # half of the room must have left
    del kept


def test_old_steps_are_forgotten() -> None:
    rate = ServiceRate()
    assert rate.seconds_for(1, 1) is None
    for _ in range(100):
        rate.record(step(1000, 0, 1.0), IterationStats())
    for _ in range(300):
        rate.record(step(0, 10, 1.0), IterationStats())
    assert rate.prompt_tokens_per_second < 1
    assert rate.output_tokens_per_second == pytest.approx(10, rel=0.01)


def test_cores_side_by_side_are_as_fast_as_all_of_them() -> None:
    one, two = ServiceRate(), ServiceRate(2)
    for rate in (one, two):
        rate.record(step(1000, 10, 1.0), IterationStats())
    assert two.prompt_tokens_per_second == 2 * one.prompt_tokens_per_second > 0
    assert two.seconds_for(100, 100) == pytest.approx(one.seconds_for(100, 100) / 2)  # type: ignore[operator]


async def test_the_engine_refuses_what_would_wait_too_long(tiny_model: str) -> None:
    config = make_config(tiny_model, max_num_seqs=2, max_num_queued_reqs=3)
    engine = await AsyncLLM.create(config)
    params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)

    async def run(tokens: int) -> int:
        async with aclosing(engine.generate([5, 6, 7], params.replace(max_tokens=tokens))) as stream:
            async for output in stream:
                last = output
        return len(last.outputs[0].token_ids)

    try:
        engine.generate([5, 6, 7], params)  # nobody reads it: its place is free again
        running = [asyncio.create_task(run(300)) for _ in range(2)]
        while engine.num_running < 2:
            await asyncio.sleep(0.01)
        assert engine._room.num_seqs == 0
        waiting = [asyncio.create_task(run(4)) for _ in range(3)]
        await asyncio.sleep(0)
        assert engine._room.num_seqs == 3
        with pytest.raises(OverloadedError):
            engine.generate([5, 6, 7], params)
        with pytest.raises(OverloadedError):
            engine.check_queue()
        text = engine.render_metrics().decode()
        assert 'reason="max_num_queued_reqs"} 2.0' in text
        assert await asyncio.gather(*running, *waiting) == [300, 300, 4, 4, 4]
        engine.check_queue()
        assert engine._room.num_seqs == engine._room.num_tokens == 0
        assert not engine._live
    finally:
        await engine.shutdown()


async def test_whoever_waits_behind_beams_is_seen(tiny_model: str) -> None:
    """A search of four beams is one sequence to its client, and four that run: others still wait."""
    engine = await AsyncLLM.create(make_config(tiny_model, max_num_seqs=4))
    plain = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
    stop = asyncio.Event()

    async def run(params: SamplingParams) -> None:
        async with aclosing(engine.generate([5, 6, 7], params)) as stream:
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.wait({reading, asyncio.ensure_future(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    try:
        beams = plain.replace(beam_search=BeamSearch(beam_width=4), output_kind=RequestOutputKind.FINAL_ONLY)
        tasks = [asyncio.create_task(run(beams))]
        while engine.num_running < 4:
            await asyncio.sleep(0.001)
        final = plain.replace(output_kind=RequestOutputKind.FINAL_ONLY)
        tasks += [asyncio.create_task(run(final)) for _ in range(2)]
        while engine.num_waiting != 2:
            await asyncio.sleep(0.001)
        stop.set()
        await asyncio.gather(*tasks)
        while engine.num_running or engine.num_waiting:
            await asyncio.sleep(0.01)
        assert engine._room.num_seqs == 0
    finally:
        await engine.shutdown()


async def test_a_queue_of_grammars_that_is_full_is_counted(tiny_async: AsyncLLM) -> None:
    tiny_async._checks._num_checks = MAX_CHECKS
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+b"))
    with pytest.raises(OverloadedError, match="grammars are waiting"):
        await tiny_async.check_constraint(params)
    assert 'admission_rejections_total{engine="0",model_name="tiny",reason="grammars"} 1.0' in (
        tiny_async.render_metrics().decode()
    )
    assert "Refused: 1 (grammars)" in (tiny_async._throughput.line() or "")
    assert "Refused" not in (tiny_async._throughput.line() or "")
