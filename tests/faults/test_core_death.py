"""The core process dies, hangs or loses count: who is answered, who is told, and that it stays bounded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
import zmq

from octavo.config import SupervisorConfig, TenantLimits, TenantTable
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.gate import PATIENCE, Gate
from octavo.engine.live_request import LiveRequest
from octavo.engine.outputs import RequestOutput
from octavo.engine.quarantine import Quarantine
from octavo.engine.supervisor import RestartBudget
from octavo.exceptions import (
    DeadlyRequestError,
    EngineDeadError,
    EngineRestartingError,
    OverloadedError,
    RequestError,
)
from octavo.messages import (
    BeamSearch,
    CacheOptions,
    CachePin,
    EngineCoreRequest,
    ReportOptions,
    RequestOutputKind,
    SchedulingOptions,
    Tenant,
)
from tests.faults.conftest import LONG, Make, metric, params, read, settled
from tests.faults.faulty_core import Fault
from tests.server.fake_engine import FakeTokenizer

RESTARTS = "octavo:core_restarts_total"


async def outcome(engine: AsyncLLM, prompt: list[int], **changes: Any) -> list[list[int]] | Exception:
    try:
        return await read(engine, prompt, params(**changes))
    except Exception as error:
        return error


async def to_the_end(stream: AsyncGenerator[RequestOutput, None]) -> None:
    async for _ in stream:
        pass


async def restarting(engine: AsyncLLM) -> None:
    """Wait until the death of the core has been noticed."""
    while engine._pool.cores[0].supervisor._dead_since is None:
        await asyncio.sleep(0.001)
    with pytest.raises(EngineRestartingError):
        await engine.check_health()


async def test_killed_under_load(make_engine: Make) -> None:
    """Streams that have begun end with an error; what nobody has seen anything of is computed again, to the token."""
    engine = await make_engine(max_num_seqs=4)
    final = RequestOutputKind.FINAL_ONLY
    unseen: list[dict[str, Any]] = [
        {"prompt": [4, 5, 6], "output_kind": final, "max_tokens": 200},
        {"prompt": [4, 5], "output_kind": final, "max_tokens": 100, "n": 3, "temperature": 0.9, "seed": 3},
        *({"prompt": [7, i], "max_tokens": 20, "temperature": 0.9} for i in range(6)),  # seeds are given in order
        {"prompt": [6] * 30, "max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 5, "logprobs": 1},
    ]
    beams = BeamSearch(beam_width=3)
    unseen.append({"prompt": [8, 9], "output_kind": final, "max_tokens": 20, "n": 2, "beam_search": beams})
    seeds = [one.get("seed", 100 + i) for i, one in enumerate(unseen)]
    unseen = [one | {"seed": seed} for one, seed in zip(unseen, seeds)]
    expected = [await outcome(engine, **one) for one in unseen]
    streams = [engine.generate([3, i], params(LONG)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    tasks = [asyncio.create_task(outcome(engine, **one)) for one in unseen]
    while engine.num_running < 4 or engine.num_waiting < 4:
        await asyncio.sleep(0.001)
    os.kill(engine.core_pids[0], signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDeadError, match=r"in the middle of this answer.*error id"):
            await to_the_end(stream)
    with pytest.raises(EngineRestartingError):
        await engine.check_health()
    assert engine.num_running == 0
    newcomer = asyncio.create_task(outcome(engine, [7, 0], max_tokens=20, temperature=0.9, seed=seeds[2]))
    assert await asyncio.gather(*tasks) == expected
    assert await newcomer == expected[2]
    await settled(engine)
    assert metric(engine, RESTARTS) == 1
    assert metric(engine, 'vllm:request_success_total{.*"error".*}') == 3


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.SEGFAULT])
async def test_a_request_that_kills_the_core_is_found_and_not_tried_again(make_engine: Make, fault: Fault) -> None:
    """It is replayed once, alone: nobody else loses anything by it."""
    engine = await make_engine(max_core_restarts=2)
    expected = [await outcome(engine, [5, i]) for i in range(20)]
    tasks = [asyncio.create_task(outcome(engine, [5, i])) for i in range(10)]
    poison = asyncio.create_task(outcome(engine, [6], seed=fault))
    tasks += [asyncio.create_task(outcome(engine, [5, i])) for i in range(10, 20)]
    error = await poison
    assert isinstance(error, RequestError)
    assert "died twice" in str(error)
    assert await asyncio.gather(*tasks) == expected
    await settled(engine)
    assert metric(engine, RESTARTS) == 2


async def test_a_request_that_kills_a_core_of_two(make_engine: Make) -> None:
    """Each time it is the same one; the other core goes on, and an equal request gets to neither of them."""
    engine = await make_engine(num_cores=2)
    expected = [await outcome(engine, [5, i], max_tokens=200) for i in range(8)]
    pids = set(engine.core_pids)
    tasks = [asyncio.create_task(outcome(engine, [5, i], max_tokens=200)) for i in range(8)]
    poison = asyncio.create_task(outcome(engine, [6], seed=Fault.KILL))
    error = await poison
    assert isinstance(error, DeadlyRequestError)
    assert len(pids & set(engine.core_pids)) == 1
    assert isinstance(await outcome(engine, [6], seed=Fault.KILL), DeadlyRequestError)
    answers = await asyncio.gather(*tasks)
    assert [one for one in answers if not isinstance(one, EngineDeadError)] == [
        known for known, one in zip(expected, answers, strict=True) if not isinstance(one, EngineDeadError)
    ]
    assert sum(isinstance(one, EngineDeadError) for one in answers) <= 4  # streams that had begun on the dead core
    await settled(engine)
    assert metric(engine, RESTARTS) == 2


async def test_a_request_that_kills_the_core_later(make_engine: Make) -> None:
    engine = await make_engine()
    error = await outcome(engine, [6], seed=Fault.KILL_LATER)
    assert isinstance(error, EngineDeadError)
    await settled(engine)
    whole = await outcome(engine, [6], seed=Fault.KILL_LATER, output_kind=RequestOutputKind.FINAL_ONLY)
    assert isinstance(whole, RequestError)
    await settled(engine)
    assert metric(engine, RESTARTS) == 3


async def test_a_request_that_kills_the_core_is_not_taken_in_again(make_engine: Make) -> None:
    """However often its client repeats it, streamed or not: it costs two deaths, and others are served."""
    engine = await make_engine(max_core_restarts=2)
    expected = await outcome(engine, [5, 5])
    poison = {"seed": Fault.KILL_LATER, "max_tokens": 30}
    of_cache: dict[str, Any] = {
        "cache": CacheOptions(pins=(CachePin(1, 60.0),)),
        "report": ReportOptions(cache_miss=True),
    }
    for _ in range(2):
        with pytest.raises((EngineDeadError, DeadlyRequestError)):  # the latter if nothing of it was read in time
            await read(engine, [6], params(**poison), **of_cache)
        await settled(engine)
    with pytest.raises(DeadlyRequestError):
        await read(engine, [6], params(**poison), **of_cache)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        error = await outcome(engine, [6], **poison, output_kind=kind)
        assert isinstance(error, DeadlyRequestError)
        assert "died each time that it computed a request like this one" in str(error)
    assert await outcome(engine, [5, 5]) == expected
    assert metric(engine, RESTARTS) == 2


async def test_the_last_restart_is_not_for_a_replay(make_engine: Make) -> None:
    """A request that kills the core after its trial is known by the third death, and not tried a fourth time."""
    engine = await make_engine(max_core_restarts=3)
    for _ in range(3):
        kind = RequestOutputKind.FINAL_ONLY
        error = await outcome(engine, [6], seed=Fault.KILL_LATER, max_tokens=30, output_kind=kind)
        assert isinstance(error, DeadlyRequestError)
        await settled(engine)
    assert metric(engine, RESTARTS) in (2, 3)  # two, if a core was gone before its first tokens were heard of


def test_quarantine_knows_requests_by_what_they_ask_for() -> None:
    now = [1000.0]
    quarantine = Quarantine(SupervisorConfig(max_core_restarts=0), lambda: now[0])

    def request(name: str, prompt: int = 1, **changes: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[prompt],
            sampling_params=params(**changes),
            arrival_time=now[0],
            scheduling=SchedulingOptions(priority=len(name)),
            cache=CacheOptions(salt=name),
        )

    for _ in range(2):
        quarantine.check(request("x"))
        equal = [request("a", seed=3), request("b", seed=4)]  # count once
        quarantine.count_death([*equal, request("c", prompt=2)])
        quarantine.clear(request("d", prompt=2, seed=9))
        now[0] += 50
    with pytest.raises(DeadlyRequestError, match="not taken in again for 250 s"):
        quarantine.check(request("y", output_kind=RequestOutputKind.FINAL_ONLY))
    quarantine.check(request("y", max_tokens=13))
    quarantine.check(request("y", prompt=2))
    now[0] += 251
    quarantine.check(request("y"))
    quarantine.convict(request("z"))
    with pytest.raises(DeadlyRequestError):
        quarantine.check(request("y"))
    quarantine.clear(request("z"))  # another one, that was under way already
    quarantine.check(request("y"))


async def test_a_core_that_hangs_is_killed(make_engine: Make) -> None:
    engine = await make_engine(step_timeout=0.4)
    expected = await outcome(engine, [5, 5])
    hung = asyncio.create_task(outcome(engine, [6], seed=Fault.HANG))
    other = asyncio.create_task(outcome(engine, [5, 5]))
    error = await hung
    assert isinstance(error, RequestError)
    assert "died twice" in str(error)
    assert await other == expected


async def test_a_stopped_core_is_killed(make_engine: Make) -> None:
    """Also when all who waited for it have left: the next one finds a core that works."""
    engine = await make_engine(step_timeout=0.4)
    expected = await outcome(engine, [5, 5])
    os.kill(engine.core_pids[0], signal.SIGSTOP)
    async with asyncio.timeout(30):
        task = asyncio.create_task(outcome(engine, [5, 5]))
        await asyncio.sleep(0.1)
        task.cancel()
        while not metric(engine, RESTARTS):
            await asyncio.sleep(0.02)
    assert await outcome(engine, [5, 5]) == expected


async def test_a_slow_core_is_not_a_hung_one(make_engine: Make) -> None:
    """Silence while nobody waits, and time in which this process stood still, count for nothing."""
    engine = await make_engine(step_timeout=0.6)
    await asyncio.sleep(0.8)
    stream = engine.generate([5], params(LONG))
    await anext(stream)
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    blocked = asyncio.get_running_loop().time() + 0.8
    while asyncio.get_running_loop().time() < blocked:
        pass
    async with aclosing(stream):
        assert await anext(stream)
        await asyncio.sleep(0.8)
    assert metric(engine, RESTARTS) == 0


async def test_a_lost_block_is_found_when_idle_and_nobody_notices(make_engine: Make) -> None:
    engine = await make_engine()
    expected = await outcome(engine, [5, 5])
    first = engine.core_pids[0]
    await outcome(engine, [6], seed=Fault.LOSE_A_BLOCK)
    while engine.core_pids[0] == first:
        await asyncio.sleep(0.01)
    assert await outcome(engine, [5, 5]) == expected
    assert metric(engine, RESTARTS) == 1
    prefix = await outcome(engine, [5] * 40)
    hits = metric(engine, "vllm:prefix_cache_hits_total")
    assert await outcome(engine, [5] * 40) == prefix
    assert metric(engine, "vllm:prefix_cache_hits_total") > hits  # the new pool caches as the old one did


async def test_the_prefix_cache_is_empty_after_a_restart(make_engine: Make) -> None:
    engine = await make_engine()

    async def cached() -> int:
        return [output.num_cached_tokens async for output in engine.generate([5] * 40, params())][-1]

    assert await cached() == 0
    assert await cached() == 32
    os.kill(engine.core_pids[0], signal.SIGKILL)
    await restarting(engine)
    assert metric(engine, "vllm:num_requests_running") == metric(engine, "vllm:num_requests_waiting") == 0
    await settled(engine)
    assert metric(engine, "vllm:kv_cache_usage_perc") == 0
    assert await cached() == 0


async def test_what_the_core_says_in_a_foreign_tongue_ends_that_core(make_engine: Make) -> None:
    engine = await make_engine()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(engine._pool.cores[0].client._messages.getsockopt_string(zmq.LAST_ENDPOINT))
        socket.send(b"junk")
        await restarting(engine)
    await settled(engine)


async def test_too_many_restarts_end_it(make_engine: Make) -> None:
    engine = await make_engine(max_core_restarts=2)
    for _ in range(2):
        os.kill(engine.core_pids[0], signal.SIGKILL)
        await restarting(engine)
        await settled(engine)
    waiting = asyncio.create_task(outcome(engine, [6], max_tokens=LONG, output_kind=RequestOutputKind.FINAL_ONLY))
    await asyncio.sleep(0.05)
    os.kill(engine.core_pids[0], signal.SIGKILL)
    gone = await engine.gone()
    assert "signal 9" in str(gone)
    assert "restarts in the last 300 s: 2" in str(gone)
    assert isinstance(await waiting, EngineDeadError)
    with pytest.raises(EngineDeadError, match="300 s: 2"):
        engine.generate([1], params())
    assert engine.num_active == 0


async def test_a_core_that_cannot_start_again_is_bounded_too(make_engine: Make, monkeypatch: Any) -> None:
    engine = await make_engine(max_core_restarts=3)
    monkeypatch.setattr("octavo.engine.core_client.BOOTSTRAP", "raise SystemExit(7)")
    os.kill(engine.core_pids[0], signal.SIGKILL)
    assert "status 7 (restarts in the last 300 s: 3)" in str(await engine.gone())


async def test_whoever_waits_for_a_core_does_so_for_a_limited_time(make_engine: Make, monkeypatch: Any) -> None:
    engine = await make_engine(core_restart_wait=0.3)
    monkeypatch.setattr("octavo.engine.core_client.BOOTSTRAP", "import time; time.sleep(1000)")
    old = asyncio.create_task(outcome(engine, [6], max_tokens=LONG, output_kind=RequestOutputKind.FINAL_ONLY))
    while not engine.num_running:
        await asyncio.sleep(0.001)
    os.kill(engine.core_pids[0], signal.SIGKILL)
    new = asyncio.create_task(outcome(engine, [7]))
    errors = await asyncio.gather(old, new)
    assert all(isinstance(error, EngineRestartingError) for error in errors)
    with pytest.raises(EngineRestartingError):
        engine.generate([1], params())
    assert (engine.num_active, engine.num_waiting) == (0, 0)
    monkeypatch.undo()
    os.kill(engine.core_pids[0], signal.SIGKILL)  # the one that never becomes ready
    await settled(engine)


async def test_a_core_that_hangs_while_it_starts_is_replaced(make_engine: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("octavo.engine.supervisor.SLOWER_START", 0.0)
    engine = await make_engine(step_timeout=2.0, max_core_restarts=1000)
    monkeypatch.setattr("octavo.engine.core_client.BOOTSTRAP", "import time; time.sleep(1000)")
    first = engine.core_pids[0]
    os.kill(first, signal.SIGKILL)
    await restarting(engine)
    while (second := engine.core_pids[0]) == first:
        await asyncio.sleep(0.01)
    monkeypatch.undo()
    waiting = asyncio.create_task(outcome(engine, [7]))
    while engine.core_pids[0] == second:
        await asyncio.sleep(0.01)
    assert isinstance(await waiting, list)
    await settled(engine)


async def test_the_queue_is_bounded_while_there_is_no_core(make_engine: Make, monkeypatch: Any) -> None:
    """What was being computed has its seats; of those that leave nothing stays."""
    engine = await make_engine(max_num_seqs=2, max_num_queued_reqs=3)
    monkeypatch.setattr("octavo.engine.core_client.BOOTSTRAP", "import time; time.sleep(1000)")
    final = RequestOutputKind.FINAL_ONLY
    tasks = [asyncio.create_task(outcome(engine, [6, i], max_tokens=LONG, output_kind=final)) for i in range(2)]
    while engine.num_running < 2:
        await asyncio.sleep(0.001)
    first = engine.core_pids[0]
    os.kill(first, signal.SIGKILL)
    while engine.core_pids[0] == first:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(outcome(engine, [7, i])) for i in range(3)]
    await asyncio.sleep(0)
    assert isinstance(await outcome(engine, [8]), OverloadedError)
    for task in tasks[2:]:
        task.cancel()
    await asyncio.wait(tasks[2:])
    assert (engine._room.num_seqs, len(engine._pool.cores[0].gate._waiting)) == (0, 0)
    tasks[2:] = [asyncio.create_task(outcome(engine, [7, i])) for i in range(3)]
    await asyncio.sleep(0)
    assert engine._room.num_seqs == 3
    monkeypatch.undo()
    os.kill(engine.core_pids[0], signal.SIGKILL)
    assert all(isinstance(done, list) for done in await asyncio.gather(*tasks))


@pytest.mark.parametrize("seen", [True, False])
async def test_the_core_dies_while_the_server_drains(make_engine: Make, seen: bool) -> None:
    """Answers that nobody has seen anything of are still computed in the time that is left."""
    engine = await make_engine()
    expected = await outcome(engine, [6], max_tokens=LONG)
    kind = RequestOutputKind.DELTA if seen else RequestOutputKind.FINAL_ONLY
    stream = asyncio.create_task(outcome(engine, [6], max_tokens=LONG, output_kind=kind))
    while not engine.num_running or (seen and not next(iter(engine._live)).collector.was_read):
        await asyncio.sleep(0.001)
    draining = asyncio.create_task(engine.shutdown(60.0))
    await asyncio.sleep(0)
    first = engine.core_pids[0]
    os.kill(first, signal.SIGKILL)
    answer = await stream
    assert isinstance(answer, EngineDeadError) if seen else answer == expected
    await draining
    with pytest.raises(ProcessLookupError):
        os.kill(engine.core_pids[0], 0)
    assert (engine.core_pids[0] == first) is seen


async def test_a_suspect_without_a_seat_holds_up_nobody(make_engine: Make, monkeypatch: Any) -> None:
    """One tenant's second request waits for its first one: others need not wait for that."""
    monkeypatch.setattr("octavo.engine.gate.PATIENCE", 0.05)
    engine = await make_engine(max_num_seqs=4)
    engine.set_tenants(TenantTable(listed={"a": TenantLimits(max_running=1)}))
    final, own = RequestOutputKind.FINAL_ONLY, SchedulingOptions(tenant=Tenant("a"))
    slow = [
        asyncio.create_task(read(engine, [6, i], params(LONG, output_kind=final), scheduling=own, request_id="slow"))
        for i in range(2)
    ]
    while not engine.num_running:
        await asyncio.sleep(0.001)
    os.kill(engine.core_pids[0], signal.SIGKILL)
    await restarting(engine)
    assert isinstance(await outcome(engine, [7]), list)
    assert not slow[1].done()
    await asyncio.gather(*slow)


async def test_leaving_while_the_core_restarts(make_engine: Make) -> None:
    engine = await make_engine()
    tasks = [asyncio.create_task(outcome(engine, [6, i], max_tokens=LONG)) for i in range(4)]
    await asyncio.sleep(0)
    os.kill(engine.core_pids[0], signal.SIGKILL)
    await restarting(engine)
    tasks += [asyncio.create_task(outcome(engine, [6, i], max_tokens=LONG)) for i in range(4)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await settled(engine)
    assert metric(engine, "vllm:num_requests_waiting") == 0


async def test_shutdown_while_the_core_restarts_leaves_no_process(make_engine: Make) -> None:
    engine = await make_engine()
    pids = {engine.core_pids[0]}
    os.kill(engine.core_pids[0], signal.SIGKILL)
    while engine.core_pids[0] in pids:
        await asyncio.sleep(0.001)
    pids.add(engine.core_pids[0])
    await engine.shutdown()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# ---- the parts alone


def test_the_budget_of_restarts() -> None:
    times = iter((0.0, 10.0, 20.0, 101.0, 111.0, 111.0))
    config = SupervisorConfig(max_core_restarts=3, core_restart_window=100.0, core_restart_backoff=2.0)
    budget = RestartBudget(config, lambda: next(times))
    assert [budget.spend(EngineDeadError("why")) for _ in range(5)] == [0.0, 2.0, 4.0, 4.0, 4.0]
    with pytest.raises(EngineDeadError, match="100 s: 3"):
        budget.spend(EngineDeadError("why"))
    none = RestartBudget(SupervisorConfig(max_core_restarts=0))
    with pytest.raises(EngineDeadError, match=r"^why$"):
        none.spend(EngineDeadError("why"))


def parent(name: str) -> LiveRequest:
    wanted = params(detokenize=False)
    request = EngineCoreRequest(request_id=name, prompt_token_ids=[1], sampling_params=wanted, arrival_time=0.0)
    return LiveRequest(name, None, request, FakeTokenizer())  # type: ignore[arg-type]


def test_the_gate_lets_one_suspect_in_at_a_time() -> None:
    submitted: list[str] = []
    clear: list[int] = []
    gate = Gate(lambda one: submitted.append(one.request_id), lambda: clear.append(len(submitted)))
    gate.enter(parent("a"))
    gate.close()
    gate.enter(parent("new1"))
    gone = parent("gone")
    gone._unfinished = 0
    gate.open([parent("x"), gone, parent("y")])
    assert submitted == ["a", "x"]
    gate.enter(parent("new2"))
    gate.heard(["other"], ())
    assert submitted == ["a", "x"]
    gate.heard(["other", "x"], ())
    assert submitted == ["a", "x", "y"]
    gate.close()  # and once more
    gate.open([parent("z")])
    gate.heard(["y"], ())
    assert submitted == ["a", "x", "y", "z"]
    gate.heard(["z"], ())
    assert submitted == ["a", "x", "y", "z", "new1", "new2"]
    assert clear == [4]  # before anybody new
    gate.enter(parent("new3"))
    assert submitted[-1] == "new3"
    gate.close()
    for name in ("new4", "new5"):
        gate.enter(left := parent(name))
    gate.leave(left)
    gate.open([])
    assert submitted[-1] == "new4"


def test_the_gate_does_not_wait_for_a_suspect_that_the_core_has_no_seat_for() -> None:
    submitted: list[str] = []
    clear: list[int] = []
    now = [100.0]
    gate = Gate(lambda one: submitted.append(one.request_id), lambda: clear.append(len(submitted)), lambda: now[0])
    gate.close()
    gate.open([parent("a"), parent("b"), parent("c")])
    gate.enter(parent("new"))
    gate.heard([], ["a"])
    now[0] += 1000  # it may take as long as it does
    gate.heard(["other"], ["other"])
    assert submitted == ["a"]
    gate.heard(["a"], [])
    now[0] += PATIENCE - 1
    gate.heard(["a"], [])
    assert submitted == ["a", "b"]
    now[0] += 1
    gate.heard(["a"], [])
    assert submitted == ["a", "b", "c", "new"]
    assert clear == [3]
    assert gate.on_trial is None
