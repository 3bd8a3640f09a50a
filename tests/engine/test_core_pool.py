"""A pool of two real cores: equal answers, load that is shared, and deaths that concern one of them only."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.core_pool import PooledCore, _summed
from octavo.exceptions import ConfigError, EngineDeadError, EngineRestartingError, ValidationError
from octavo.messages import (
    BlocksSaved,
    KVTierStats,
    ListPrefixes,
    NotFound,
    PinEnded,
    PinInfo,
    PoolPicture,
    RemovePin,
    RequestOutputKind,
    ResetCache,
    SamplingParams,
    SavePrefixes,
    SchedulerStats,
    SetPin,
)

from .test_async_llm import LONG, metric, settled
from .tiny_llama import make_config

Make = Callable[..., Awaitable[AsyncLLM]]
Answer = list[tuple[list[int], Any]]  # of each sample: token ids, log-probabilities
FINAL = RequestOutputKind.FINAL_ONLY


@pytest_asyncio.fixture
async def make(tiny_model: str) -> AsyncIterator[Make]:
    """Engines of two cores."""
    made: list[AsyncLLM] = []

    async def make(num_cores: int = 2, **changes: Any) -> AsyncLLM:
        config = make_config(tiny_model, **({"core_restart_backoff": 0.0} | changes))
        made.append(await AsyncLLM.create(config, num_cores=num_cores))
        return made[-1]

    yield make
    for engine in made:
        await engine.shutdown()
        for core in engine._pool.cores:
            assert (core.num_seqs, core.num_prompt_tokens, len(core._live)) == (0, 0, 0)


def params(max_tokens: int = 20, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "output_kind": FINAL}
    return SamplingParams(max_tokens=max_tokens, **(fields | changes))


async def answer(engine: AsyncLLM, prompt: list[int], wanted: SamplingParams) -> Answer:
    outputs = [output async for output in engine.generate(prompt, wanted)]
    return [(list(sample.token_ids), sample.logprobs) for sample in outputs[-1].outputs]


def cores_of(engine: AsyncLLM) -> list[PooledCore]:
    """The cores of the open streams, in order of arrival."""
    return [core for live in engine._live if (core := live.core) is not None]


def killed(engine: AsyncLLM, core: PooledCore) -> None:
    os.kill(core.client.pid, signal.SIGKILL)
    assert core.client.pid in engine.core_pids


async def test_answers_are_those_of_one_core(make: Make) -> None:
    wanted = [
        params(40, logprobs=2),
        params(30, temperature=0.9, seed=7, n=3, logprobs=1),
        params(25, temperature=1.0, seed=8, top_p=0.9, repetition_penalty=1.1, logprobs=1),
    ]
    work = [([5 + i, 6, 7 + i % 3] * (1 + i), wanted[i % 3]) for i in range(12)]
    one = await make(1)
    expected = await asyncio.gather(*(answer(one, prompt, each) for prompt, each in work))
    two = await make()
    tasks = [asyncio.create_task(answer(two, prompt, each)) for prompt, each in work]
    await asyncio.sleep(0)
    shares = [len([core for core in cores_of(two) if core is each]) for each in two._pool.cores]
    assert sum(shares) == len(work)
    assert min(shares) >= 3
    assert await asyncio.gather(*tasks) == expected
    await settled(two)
    assert metric(two, r"generation_tokens_total\{.*\}") == metric(one, r"generation_tokens_total\{.*\}")


async def test_a_request_goes_to_the_core_with_the_fewest_sequences(make: Make) -> None:
    engine = await make()
    first, second = engine._pool.cores
    work = [
        ([5], params(LONG, n=3)),
        ([6], params(LONG)),
        ([7], params(LONG)),
        ([8] * 9, params(LONG)),
        ([9], params(LONG)),
    ]
    tasks = []
    for prompt, wanted in work:
        tasks.append(asyncio.create_task(answer(engine, prompt, wanted)))
        await asyncio.sleep(0)
    assert cores_of(engine) == [first, second, second, second, first]  # the last: 3 sequences each, and fewer tokens
    assert (first.num_seqs, second.num_seqs) == (4, 3)
    while engine.num_running < 7:
        await asyncio.sleep(0.001)
    assert metric(engine, r"num_requests_running\{.*\}") == 7
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await settled(engine)
    assert metric(engine, r"kv_cache_usage_perc\{.*\}") == 0


async def test_a_death_concerns_the_requests_of_one_core(make: Make) -> None:
    """Those of the other go on; those of the dead one are computed again; who comes meanwhile goes to the other."""
    engine = await make()
    work = [([4 + i, 5], params(LONG if i < 2 else 200, temperature=0.8, seed=i)) for i in range(8)]
    expected = [await answer(engine, prompt, wanted) for prompt, wanted in work]
    await settled(engine)
    tasks = [asyncio.create_task(answer(engine, prompt, wanted)) for prompt, wanted in work]
    await asyncio.sleep(0)
    dying, other = (core for core in cores_of(engine)[:2])
    assert dying is not other
    lives = list(engine._live)
    while dying.num_seats == 0:
        await asyncio.sleep(0.001)
    killed(engine, dying)
    while dying.supervisor.error() is None:
        await asyncio.sleep(0.001)
    assert isinstance(dying.supervisor.error(), EngineRestartingError)
    await engine.check_health()
    newcomers = [asyncio.create_task(answer(engine, *work[-1])) for _ in range(3)]
    await asyncio.sleep(0)
    assert {live.core for live in engine._live if live not in lives} == {other}
    assert await asyncio.gather(*tasks, *newcomers) == [*expected, *[expected[-1]] * 3]
    assert {live.times_submitted for live in lives if live.core is other} == {1}
    assert {live.times_submitted for live in lives if live.core is dying} == {2}
    while dying.supervisor.error() is not None:
        await asyncio.sleep(0.01)
    await settled(engine)
    assert re.search(r"^octavo:core_restarts_total\{.*\} 1.0$", engine.render_metrics().decode(), re.MULTILINE)
    assert await answer(engine, *work[0]) == expected[0]


async def test_a_core_that_is_gone_for_good_leaves_the_others(make: Make) -> None:
    engine = await make(max_core_restarts=0)
    expected = await answer(engine, [5], params(LONG))
    tasks = [asyncio.create_task(answer(engine, [5], params(LONG))) for _ in range(2)]
    await asyncio.sleep(0)
    dying, other = cores_of(engine)
    killed(engine, dying)
    with pytest.raises(EngineDeadError):
        await tasks[0]
    assert await tasks[1] == expected
    assert await answer(engine, [5], params(LONG)) == expected
    await engine.check_health()
    waiting = asyncio.create_task(answer(engine, [5], params(LONG)))
    await asyncio.sleep(0)
    assert cores_of(engine) == [other]
    killed(engine, other)
    assert "signal 9" in str(await engine.gone())
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError):
        engine.generate([5], params())


async def test_every_core_handles_a_query(make: Make) -> None:
    engine = await make()
    tasks = [asyncio.create_task(answer(engine, [5 + i] * 40, params())) for i in range(2)]
    await asyncio.gather(*tasks)
    listed = await engine.ask(ListPrefixes(10))
    assert (listed.num_prefixes, len(listed.prefixes)) == (2, 2)
    assert listed.prefixes[0].idle <= listed.prefixes[1].idle
    assert len((await engine.ask(ListPrefixes(1))).prefixes) == 1
    picture = await engine.ask(PoolPicture())
    assert len(picture.blocks) == sum(picture.num_blocks.values()) == 2 * engine.info.num_blocks
    assert await engine.ask(SetPin(60.0, prefix=b"unknown")) == NotFound()
    pinned = await engine.ask(SetPin(60.0, prefix=listed.prefixes[1].prefix))  # that one of them has
    assert not isinstance(pinned, NotFound)
    query = SetPin(60.0, prompt_token_ids=[7] * 40)  # one pin, though both cores keep it
    assert isinstance(both := await engine.ask(query), PinInfo)
    held = await engine.ask(ListPrefixes(1))
    assert {pin.pin_id for pin in held.pins} == {pinned.pin_id, both.pin_id}
    assert len(held.pins) == 2
    assert await engine.ask(RemovePin(both.pin_id)) == PinEnded()
    assert [pin.pin_id for pin in (await engine.ask(ListPrefixes(1))).pins] == [pinned.pin_id]
    with pytest.raises(ValidationError, match="less than 16, a block"):
        await engine.ask(SetPin(60.0, prompt_token_ids=[1]))
    cleared = await engine.ask(ResetCache())
    assert cleared.num_blocks == listed.num_cached_blocks > 0
    assert (await engine.ask(ListPrefixes(10))).num_prefixes == 0


async def test_several_cores_must_know_what_memory_each_takes(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        await AsyncLLM.create(make_config(tiny_model, kv_cache_memory=None), num_cores=2)


def test_gauges_are_summed_and_counters_are_those_of_the_news() -> None:
    tiers = [{"host": KVTierStats(usage=usage, loaded_bytes_delta=8)} for usage in (0.5, 1.0)]
    news = SchedulerStats(
        num_running=3, num_waiting=1, num_blocks=30, kv_cache_usage=0.5, num_preemptions_delta=2, kv_tiers=tiers[0]
    )
    other = SchedulerStats(
        num_running=2, num_deferred=4, num_blocks=10, kv_cache_usage=0.1, num_preemptions_delta=9, kv_tiers=tiers[1]
    )
    total = _summed(news, [news, other])
    assert (total.num_running, total.num_waiting, total.num_deferred, total.num_blocks) == (5, 1, 4, 40)
    assert total.kv_cache_usage == pytest.approx(0.4)
    assert total.num_preemptions_delta == 2
    assert total.kv_tiers["host"] == KVTierStats(usage=0.75, loaded_bytes_delta=8)
    none = _summed(SchedulerStats(), [news, other])
    assert (none.num_preemptions_delta, none.kv_tiers["host"].loaded_bytes_delta) == (0, 0)


def test_answers_of_several_cores_are_one() -> None:
    save = SavePrefixes(b"x")
    assert save.merge([NotFound(), BlocksSaved(3), BlocksSaved(4)]) == BlocksSaved(7)
    assert save.merge([NotFound(), NotFound()]) == NotFound()
