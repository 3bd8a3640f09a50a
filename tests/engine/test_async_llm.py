"""AsyncLLM with a real core process: streams, aborts, death, drain."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.exceptions import ConfigError, DeadlineError, EngineDeadError, ModelError, RequestError, ValidationError
from octavo.messages import (
    CacheMiss,
    CacheOptions,
    CachePin,
    ListPrefixes,
    NotFound,
    PrefixList,
    Query,
    ReportOptions,
    RequestOutputKind,
    SamplingParams,
    SchedulingOptions,
    SetPin,
)

from .tiny_llama import make_config

LONG = 480  # tokens: on the tiny model, long enough that something can be done in the middle


def params(max_tokens: int = 20, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return SamplingParams(max_tokens=max_tokens, **(fields | changes))


async def read(engine: AsyncLLM, prompt: str | list[int], wanted: SamplingParams, **kwargs: Any) -> list[int]:
    """Token ids of sample 0 and, of course, of the stream's end."""
    ids: list[int] = []
    finished = False
    async for output in engine.generate(prompt, wanted, **kwargs):
        ids += [token for sample in output.outputs if sample.index == 0 for token in sample.token_ids]
        finished = output.finished
    assert finished
    return ids


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output of a stream."""
    return [output async for output in stream][-1]


async def settled(engine: AsyncLLM) -> None:
    """Wait for the message that says that nothing runs; the test's timeout bounds it."""
    while engine.num_running or engine.num_waiting or engine.num_active:
        await asyncio.sleep(0.01)


def metric(engine: AsyncLLM, pattern: str) -> float:
    found = re.search(rf"^vllm:{pattern} (\S+)$", engine.render_metrics().decode(), re.MULTILINE)
    assert found is not None, pattern
    return float(found[1])


def successes(engine: AsyncLLM) -> dict[str, float]:
    text = engine.render_metrics().decode()
    return {
        r: float(v)
        for r, v in re.findall(r'^vllm:request_success_total{.*?finished_reason="(\w+)".*} (\S+)$', text, re.M)
    }


async def test_same_tokens_as_in_process(tiny_async: AsyncLLM, tiny_engine: LLMEngine) -> None:
    tiny_engine.add_request("the lazy dog", params(output_kind=RequestOutputKind.FINAL_ONLY))
    (expected,) = [output for _ in range(20) for output in tiny_engine.step()]
    assert await read(tiny_async, "the lazy dog", params()) == expected.outputs[0].token_ids
    assert tiny_async.info.max_model_len == tiny_engine.info.max_model_len
    assert next(name for name, _ in tiny_async.info.phases) == "start core process"
    assert "kernels" in tiny_async.info.facts


async def test_plain_keywords_say_what_the_options_say(tiny_async: AsyncLLM) -> None:
    """Salt, pins and the wish for a report, given by name, reach the core; so they do as a struct."""
    prompt, wanted = list(range(5, 53)), params(1, output_kind=RequestOutputKind.FINAL_ONLY)
    pins = [CachePin(32, 60.0)]
    for salt in ("a", "b"):  # each its own cache: nothing is found
        output = await last(
            tiny_async.generate(prompt, wanted, cache_salt=salt, cache_pins=pins, wants_cache_report=True, priority=3)
        )
        assert (output.num_cached_tokens, output.num_pinned_tokens) == (0, 32)
        assert output.cache_miss == CacheMiss("new", 0, 0)
    options: dict[str, Any] = {"cache": CacheOptions(salt="a"), "report": ReportOptions(cache_miss=True)}
    output = await last(tiny_async.generate(prompt, wanted, **options))
    assert (output.num_cached_tokens, output.num_pinned_tokens) == (32, 0)
    assert output.cache_miss == CacheMiss("complete", 32, 32)
    with pytest.raises(DeadlineError):
        await last(tiny_async.generate(prompt[:4], params(LONG), timeout=0.05))


@pytest.mark.parametrize(
    "given",
    [
        {"scheduling": SchedulingOptions(), "priority": 1},
        {"cache": CacheOptions(), "cache_salt": "a"},
        {"report": ReportOptions(), "wants_cache_report": True},
    ],
    ids=lambda given: next(iter(given)),
)
async def test_what_is_given_twice_is_refused(tiny_async: AsyncLLM, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        tiny_async.generate([5], params(), **given)
    assert refused.value.parameter == next(iter(given))


async def test_refusals_come_at_the_call(tiny_async: AsyncLLM) -> None:
    with pytest.raises(ValidationError):
        tiny_async.generate([-1], params())
    await settled(tiny_async)
    assert sum(successes(tiny_async).values()) == 0


async def test_a_request_that_cannot_be_sent_fails_alone(tiny_async: AsyncLLM) -> None:
    """msgpack carries no lone surrogate: the stop string of one request must not take another with it."""
    good = asyncio.create_task(read(tiny_async, [1, 2], params(5)))
    bad = asyncio.create_task(read(tiny_async, [1, 2], params(5, stop=["\ud800"])))
    with pytest.raises(RequestError, match="sending it"):
        await bad
    assert len(await good) == 5
    await settled(tiny_async)
    assert len(await read(tiny_async, [1, 2], params(5))) == 5


async def test_what_is_submitted_waits_from_that_moment(tiny_async: AsyncLLM) -> None:
    streams = [tiny_async.generate([7], params(5, n=2)) for _ in range(3)]
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    assert (tiny_async.num_running, tiny_async.num_waiting) == (0, 6)
    assert metric(tiny_async, "num_requests_waiting{.*}") == 6
    assert metric(tiny_async, 'num_requests_waiting_by_reason{.*"capacity"}') == 6
    await asyncio.gather(*tasks)
    for stream in streams:
        await stream.aclose()
    await settled(tiny_async)


async def test_what_a_request_leaves_in_the_histograms(tiny_async: AsyncLLM) -> None:
    prompt = [3] * 40
    await read(tiny_async, prompt, params(7, n=2, temperature=1.0))
    await read(tiny_async, prompt, params(4))
    await settled(tiny_async)
    assert metric(tiny_async, "request_max_num_generation_tokens_sum{.*}") == 7 + 4
    assert metric(tiny_async, "request_max_num_generation_tokens_count{.*}") == 2
    assert metric(tiny_async, "request_num_preemptions_sum{.*}") == 0
    cached = metric(tiny_async, "prompt_tokens_cached_total{.*}")
    assert cached >= 32  # the last request's full blocks, at least
    computed = metric(tiny_async, "request_prefill_kv_computed_tokens_sum{.*}")
    assert computed == 2 * 40 - cached  # the two samples share their prompt
    assert metric(tiny_async, "request_prefill_kv_computed_tokens_count{.*}") == 3


async def test_many_streams_half_of_them_cancelled(tiny_async: AsyncLLM) -> None:
    """64 streams of mixed lengths and kinds; every second one is left in one of three ways."""

    async def leave_early(index: int) -> None:
        stream = tiny_async.generate([index + 2] * (1 + index % 40), params(LONG - 100))
        async with aclosing(stream):
            async for _ in stream:
                if index % 3 == 0:
                    return
                break

    tasks = []
    for index in range(32):
        wanted = params(5 + index, n=1 + index % 3, temperature=0.9, output_kind=list(RequestOutputKind)[index % 3])
        tasks.append(asyncio.create_task(read(tiny_async, [index + 2] * (1 + 3 * index), wanted)))
        tasks.append(asyncio.create_task(leave_early(index)))
    await asyncio.sleep(0)
    cancelled = [task for index, task in enumerate(tasks) if index % 8 == 1]
    for task in cancelled:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == len(cancelled)
    assert not [result for result in results if isinstance(result, Exception)]
    await settled(tiny_async)
    assert metric(tiny_async, "kv_cache_usage_perc{.*}") == 0
    reasons = successes(tiny_async)
    samples = sum(1 + index % 3 for index in range(32))
    assert reasons["length"] == samples
    assert reasons["error"] == reasons["stop"] == 0
    admitted = metric(tiny_async, "e2e_request_latency_seconds_count{.*}")
    assert reasons["abort"] == admitted - samples
    assert metric(tiny_async, "request_prompt_tokens_count{.*}") == admitted
    # every block is free or cached: one that needs nearly the whole pool runs
    assert len(await read(tiny_async, [1] * 500, params(10))) == 10


async def test_abort_by_external_id(tiny_async: AsyncLLM) -> None:
    outputs: list[RequestOutput] = []
    async for output in tiny_async.generate([1, 2], params(LONG, n=2), request_id="mine"):
        assert output.request_id == "mine"
        outputs.append(output)
        await tiny_async.abort("mine")
    ends = {sample.index: sample.finish_reason for output in outputs for sample in output.outputs if sample.finished}
    assert ends == {0: "abort", 1: "abort"}
    assert outputs[-1].finished
    await settled(tiny_async)
    assert successes(tiny_async)["abort"] == 2
    await tiny_async.abort("nobody")


async def test_external_ids_may_repeat(tiny_async: AsyncLLM) -> None:
    both = await asyncio.gather(*(read(tiny_async, [3, 4], params(), request_id="id") for _ in range(2)))
    assert both[0] == both[1]
    for _ in range(50):  # abort one and submit its id again at once: the late abort must not hit the new one
        stream = tiny_async.generate([3, 4], params(LONG), request_id="id")
        await anext(stream)
        await stream.aclose()
        assert len(await read(tiny_async, [3, 4], params(3), request_id="id")) == 3
    await settled(tiny_async)


async def test_stop_strings_end_the_request_in_the_core(tiny_async: AsyncLLM) -> None:
    text = ""
    async for output in tiny_async.generate("the", params(LONG)):
        text += output.outputs[0].text
        if len(text) > 8:
            break
    stopped = ""
    async for output in tiny_async.generate("the", params(LONG, stop=[text[4:7]])):
        stopped += output.outputs[0].text
    assert stopped == text[: text.index(text[4:7])]
    await settled(tiny_async)
    assert successes(tiny_async)["stop"] == 1


async def test_a_slow_reader_gets_all_of_it(tiny_async: AsyncLLM) -> None:
    expected = await read(tiny_async, [9, 8], params(200))
    stream = tiny_async.generate([9, 8], params(200))
    ids = list((await anext(stream)).outputs[0].token_ids)
    assert await read(tiny_async, [9, 8], params(200)) == expected  # meanwhile another one is served
    await settled_core(tiny_async)
    rest = [output async for output in stream]
    assert ids + [token for output in rest for token in output.outputs[0].token_ids] == expected
    assert len(rest) == 1


async def settled_core(engine: AsyncLLM) -> None:
    while engine.num_running or engine.num_waiting:
        await asyncio.sleep(0.01)


async def test_killed_core_is_noticed_by_all(tiny_model: str) -> None:
    tiny_async = await AsyncLLM.create(make_config(tiny_model, max_core_restarts=0))
    streams = [tiny_async.generate([i + 1], params(LONG, n=1 + i % 2)) for i in range(20)]
    waiting = [asyncio.create_task(drain(stream)) for stream in streams]
    while not (tiny_async.num_running and tiny_async.num_waiting):
        await asyncio.sleep(0.001)
    os.kill(tiny_async.core_pids[0], signal.SIGKILL)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)
    causes = ("killed by signal 9", "died in the middle of this answer")  # nothing was answered yet; something was
    assert all(any(cause in str(result) for cause in causes) for result in results)
    with pytest.raises(EngineDeadError, match="signal 9"):
        await tiny_async.check_health()
    with pytest.raises(EngineDeadError):
        tiny_async.generate([1], params())
    assert successes(tiny_async)["error"] == 30
    assert (tiny_async.num_running, tiny_async.num_active) == (0, 0)
    await tiny_async.shutdown()


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_signals_to_the_core_leave_it_alone(tiny_async: AsyncLLM) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(tiny_async.core_pids[0], number)
    assert len(await read(tiny_async, [1], params(5))) == 5
    await tiny_async.check_health()


async def test_shutdown_drains_then_ends_the_rest(tiny_model: str) -> None:
    engine = await AsyncLLM.create(make_config(tiny_model))
    running = asyncio.create_task(read(engine, [5], params(60)))
    while not engine.num_active:
        await asyncio.sleep(0)
    shutdown = asyncio.create_task(engine.shutdown(60.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shut"):
        engine.generate([1], params())
    assert len(await running) == 60
    await shutdown
    await engine.shutdown()

    engine = await AsyncLLM.create(make_config(tiny_model))
    stream = engine.generate([5], params(LONG))
    await anext(stream)
    await engine.shutdown(0.0)
    with pytest.raises(EngineDeadError, match="the server is shutting down"):
        await drain(stream)


async def test_a_cancelled_shutdown_still_kills_a_core_that_hangs(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.core_client.EXIT_SECONDS", 0.5)
    engine = await AsyncLLM.create(make_config(tiny_model))
    os.kill(engine.core_pids[0], signal.SIGSTOP)
    first = asyncio.create_task(engine.shutdown())
    await asyncio.sleep(0.1)
    first.cancel()
    await engine.shutdown()
    assert not alive(engine.core_pids[0])


async def test_start_up_errors_keep_their_class(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        await AsyncLLM.create(make_config(tiny_model, kv_cache_memory=100))
    (tmp_path / "tokenizer.json").write_bytes((Path(tiny_model) / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        await AsyncLLM.create(make_config(str(tmp_path)))


async def test_a_missing_tokenizer_ends_the_start(tiny_model: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(tiny_model) / name).read_bytes())
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        await AsyncLLM.create(make_config(str(tmp_path)))


async def test_a_core_that_fails_says_why(tiny_model: str) -> None:
    tiny_async = await AsyncLLM.create(make_config(tiny_model, max_core_restarts=0))
    stream = tiny_async.generate([1], params(LONG))
    await anext(stream)
    tiny_async._pool.cores[0].client._commands.send(b"junk")
    with pytest.raises(EngineDeadError, match=r"the engine core died in the middle of this answer.*error id"):
        await drain(stream)
    with pytest.raises(EngineDeadError, match="Expected `object`"):
        await tiny_async.check_health()
    await tiny_async.shutdown()


class Unknown(Query[NotFound], frozen=True, tag=True):
    """No core has a handler for it."""


async def test_a_query_that_the_core_cannot_read_fails_alone(tiny_async: AsyncLLM) -> None:
    """Its caller is told; those that travel with it are answered, and the request that runs goes on."""
    expected = await read(tiny_async, [1, 2], params(LONG))
    running = asyncio.create_task(read(tiny_async, [1, 2], params(LONG)))
    while not tiny_async.num_running:
        await asyncio.sleep(0.001)
    queries = [
        ListPrefixes(1),
        Unknown(),
        ListPrefixes(True),  # a bool is no int to the reader
        SetPin(1.0, prompt_token_ids=[1], cache_salt="\ud800"),
        ListPrefixes(1),
    ]
    first, unknown, wrong, unsendable, last = await asyncio.gather(
        *map(tiny_async.ask, queries), return_exceptions=True
    )
    assert isinstance(first, PrefixList)
    assert isinstance(last, PrefixList)
    assert isinstance(unknown, RequestError)
    assert re.search("cannot read this query: Invalid value 'Unknown'", str(unknown))
    assert isinstance(wrong, RequestError)
    assert re.search("cannot read this query: Expected `int`, got `bool`", str(wrong))
    assert isinstance(unsendable, UnicodeEncodeError)
    assert await running == expected


async def test_a_query_to_a_core_that_dies_is_answered(tiny_model: str) -> None:
    engine = await AsyncLLM.create(make_config(tiny_model, max_core_restarts=0))
    assert (await engine.ask(ListPrefixes(1))).prefixes == []
    with pytest.raises(ValidationError, match="less than 16, a block"):
        await engine.ask(SetPin(1.0, prompt_token_ids=[1]))
    os.kill(engine.core_pids[0], signal.SIGSTOP)
    queries = [asyncio.ensure_future(engine.ask(ListPrefixes(1))) for _ in range(2)]
    queries[0].cancel()
    await asyncio.sleep(0.05)
    os.kill(engine.core_pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        await queries[1]
    with pytest.raises(EngineDeadError):
        await engine.ask(ListPrefixes(1))
    await engine.shutdown()


async def test_phases_are_told_in_order(tiny_model: str) -> None:
    names: list[str] = []
    engine = await AsyncLLM.create(make_config(tiny_model), names.append)
    assert names == ["read model header", "build program", "load weights"]
    await engine.shutdown()


@pytest.mark.parametrize("stop", [False, True], ids=["awake", "stopped"])
def test_the_core_dies_with_its_parent(tiny_model: str, stop: bool) -> None:
    """Kill -9 of the front end: the core process ends by itself, stopped or not, and leaves no files."""
    program = f"""
        import asyncio, os, signal, sys
        from octavo.engine.async_llm import AsyncLLM
        from tests.engine.tiny_llama import make_config
        async def main():
            engine = await AsyncLLM.create(make_config({tiny_model!r}))
            print(engine.core_pids[0], len(os.listdir(os.environ["TMPDIR"])), flush=True)
            if {stop}:
                os.kill(engine.core_pids[0], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, for sockets live in it
        done = subprocess.run(  # the core inherits the pipes: their end is the end of both processes
            command,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"TMPDIR": folder},
            timeout=60,
            check=False,
        )
        left = os.listdir(folder)
    assert done.returncode == -signal.SIGKILL
    pid, files = map(int, done.stdout.split())
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:  # a process closes its pipes a moment before it is gone
        time.sleep(0.01)
    assert not alive(pid)
    assert files == 1
    assert left == []


def alive(pid: int) -> bool:
    """Whether the process runs (an ended one may wait for its new parent to collect it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_core_process_loads_no_web_framework() -> None:
    code = (
        "import sys, octavo.engine.core_proc, octavo.engine.core_builder\n"
        "bad = {'fastapi', 'uvicorn', 'starlette', 'torch', 'tokenizers', 'prometheus_client', 'rich'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
