"""Engines whose core breaks on request, and what must be true of them afterwards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from octavo.engine import core_client
from octavo.engine.async_llm import AsyncLLM
from octavo.messages import RequestOutputKind, SamplingParams
from tests.engine.conftest import tiny_model
from tests.engine.tiny_llama import make_config
from tests.faults import faulty_core

__all__ = ["tiny_model"]

LONG = 400  # tokens: on the tiny model, long enough that something can be done in the middle
PLAIN = [9, 8, 7]


def params(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return SamplingParams(max_tokens=max_tokens, **(fields | changes))


async def read(engine: AsyncLLM, prompt: str | list[int], wanted: SamplingParams, **kwargs: Any) -> list[list[int]]:
    """Token ids of every sample."""
    ids: list[list[int]] = [[] for _ in range(wanted.n)]
    async for output in engine.generate(prompt, wanted, **kwargs):
        for sample in output.outputs:
            whole = sample.token_ids if wanted.output_kind != RequestOutputKind.DELTA else None
            ids[sample.index] = list(whole) if whole is not None else ids[sample.index] + sample.token_ids
    return ids


def metric(engine: AsyncLLM, name: str) -> float:
    """The sum of a metric's samples whose line begins like the pattern ``name``."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", engine.render_metrics().decode(), re.MULTILINE)
    assert found, name
    return sum(map(float, found))


Make = Callable[..., Awaitable[AsyncLLM]]


@pytest_asyncio.fixture
async def make_engine(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Engines with a faulty core; at the end each is healthy and idle, and answers as it did at first."""
    monkeypatch.setattr(core_client, "BOOTSTRAP", faulty_core.BOOTSTRAP)
    made: list[tuple[AsyncLLM, list[list[int]]]] = []

    async def make(num_cores: int = 1, **changes: Any) -> AsyncLLM:
        config = make_config(tiny_model, **({"core_restart_backoff": 0.0} | changes))
        engine = await AsyncLLM.create(config, num_cores=num_cores)
        made.append((engine, await read(engine, PLAIN, params())))
        return engine

    try:
        yield make
        for engine, answer in made:
            if not engine._pool.is_dead and not engine._closing:
                await settled(engine)
                assert await read(engine, PLAIN, params()) == answer
                await settled(engine)
                assert metric(engine, "vllm:kv_cache_usage_perc") == 0
                assert len(await read(engine, [1] * 500, params(2))) == 1  # needs nearly the whole pool
                assert not engine._output._samples
                for core in engine._pool.cores:
                    assert not core._live
                    assert not core.gate._waiting
                    assert (core.num_seqs, core.num_prompt_tokens) == (0, 0)
    finally:
        for engine, _ in made:
            await engine.shutdown()


async def settled(engine: AsyncLLM) -> None:
    """Wait until the core is there and nothing runs; the test's time-out bounds it."""
    cores = engine._pool.cores
    while any(core.supervisor.error() for core in cores) or engine.num_running + engine.num_waiting + engine.num_active:
        await asyncio.sleep(0.01)
    await engine.check_health()
