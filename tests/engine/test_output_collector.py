"""A slow reader finds everything, merged."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.output_collector import OutputCollector
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.exceptions import EngineDeadError
from octavo.messages import RequestOutputKind


def delta(index: int, token: int, finish_reason: str | None = None) -> RequestOutput:
    sample = CompletionOutput(
        index=index,
        text=chr(97 + token),
        token_ids=[token],
        logprobs=[{token: Logprob(-1.0, 1, chr(97 + token))}],
        finish_reason=finish_reason,
    )
    return RequestOutput(request_id="x", prompt=None, prompt_token_ids=[1], outputs=[sample])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.booleans())))
def test_merged_deltas_add_up(events: list[tuple[int, int, bool]]) -> None:
    """Whatever the reader's pace (the flag: it reads now), each sample's tokens arrive once and in order."""

    async def check() -> None:
        collector = OutputCollector(RequestOutputKind.DELTA)
        seen: dict[int, list[int]] = {}

        async def read() -> None:
            if collector:
                for sample in (await collector.get()).outputs:
                    assert len(sample.logprobs or []) == len(sample.token_ids) == len(sample.text)
                    seen.setdefault(sample.index, []).extend(sample.token_ids)

        for index, token, reads in events:
            collector.put(delta(index, token))
            if reads:
                await read()
        await read()
        assert not collector
        expected: dict[int, list[int]] = {}
        for index, token, _ in events:
            expected.setdefault(index, []).append(token)
        assert seen == expected

    asyncio.run(check())


async def test_the_end_of_a_sample_survives_merging() -> None:
    collector = OutputCollector(RequestOutputKind.DELTA)
    for output in (delta(0, 1), delta(0, 2, "stop"), delta(1, 3)):
        collector.put(output)
    merged = await collector.get()
    assert [(s.index, s.text, s.finish_reason) for s in merged.outputs] == [(0, "bc", "stop"), (1, "d", None)]


async def test_cumulative_outputs_replace_each_other() -> None:
    collector = OutputCollector(RequestOutputKind.CUMULATIVE)
    collector.put(delta(0, 1))
    collector.put(delta(0, 2))
    assert (await collector.get()).outputs[0].token_ids == [2]


async def test_an_error_reaches_those_who_wait_and_those_who_come_later() -> None:
    collector = OutputCollector(RequestOutputKind.DELTA)
    waiter = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await waiter
    with pytest.raises(EngineDeadError):
        await collector.get()


async def test_what_is_held_back_is_what_comes_later_and_what_has_ended() -> None:
    """A sample that has not ended will be computed again: what nobody has taken of it is void."""
    collector = OutputCollector(RequestOutputKind.DELTA)
    for output in (delta(0, 1), delta(0, 2, "stop"), delta(1, 3)):
        collector.put(output)
    collector.hold()
    waiting = asyncio.create_task(collector.get())
    collector.put(delta(1, 4))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert not collector.was_read
    collector.put(delta(1, 5))
    collector.release()
    assert [(s.index, s.text) for s in (await waiting).outputs] == [(0, "bc"), (1, "ef")]
    assert collector.was_read
    collector.hold()
    last = delta(1, 6, "stop")
    last.finished = True
    collector.put(last)
    assert (await collector.get()).outputs[0].text == "g"  # nothing of a whole answer can be void
    collector.put(delta(0, 1))
    collector.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):  # an error does not wait
        await collector.get()
