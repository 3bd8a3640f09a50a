"""What a step costs besides the model: scheduler, input preparation, sampling, messages, and the API process.

    python benchmarks/host_side.py engine [--requests 32] [--steps 200] [--sampling greedy]
    python benchmarks/host_side.py api    [--requests 32] [--tokens 256] [--runs 3] [--loop asyncio|uvloop]
    python benchmarks/host_side.py server [--requests 32] [--tokens 256] [--threads 2] [--runs 3]

``engine``: EngineCore in this process; median microseconds of CPU time of a part in a decoding step, so that a busy
machine changes little. ``api``: the API process alone, with a core that has a token ready for each request every 4 ms;
CPU time per streamed token. ``server``: `octavo serve` as users start it, streams over HTTP; CPU time per token of
the API process and of the core, throughput, and the gap between chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-k": {"temperature": 0.8, "seed": 1, "top_k": 50},
    "top-p": {"temperature": 0.8, "seed": 1, "top_p": 0.95},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "json": {"temperature": 0.8, "seed": 1},  # constrained, see GRAMMAR
    "penalty": {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
}

# An array of objects, so that it never ends; as the checker of structured_output writes it.
GRAMMAR = """start: "[" object ("," object)* "]"
object: %json {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
  "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "age", "tags"]}
%llguidance {"no_forcing": true}
"""


class Parts:
    """CPU and wall time of functions by name, step by step."""

    def __init__(self) -> None:
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.wall: dict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            result = inner(*args, **kwargs)
            self.cpu[name].append(time.thread_time() - cpu)
            self.wall[name].append(time.perf_counter() - wall)
            return result

        setattr(owner, attribute, timed)

    def clear(self) -> None:
        self.cpu.clear()
        self.wall.clear()


def engine(args: argparse.Namespace) -> None:

    from octavo.args.engine_args import engine_config_from_kwargs
    from octavo.args.resolve import resolve_engine_config
    from octavo.engine.core_builder import build_core
    from octavo.executor.uniproc import UniprocExecutor
    from octavo.messages import EngineCoreRequest, OutputOptions, SamplingParams
    from octavo.platforms.registry import make_platform
    from octavo.worker import model_runner

    settings: dict[str, Any] = {
        "model": args.model,
        "threads": args.threads,
        "enable_prefix_caching": False,
        "max_model_len": 2048,
    }
    settings["pipeline_depth"] = args.depth
    config = resolve_engine_config(engine_config_from_kwargs(**settings), None)
    executors: list[UniprocExecutor] = []

    def make(config: Any) -> UniprocExecutor:
        executors.append(UniprocExecutor(config, make_platform()))
        return executors[0]

    core = build_core(config, make)
    runner: Any = executors[0]._worker._runner
    parts = Parts()
    parts.wrap(core._scheduler, "schedule", "schedule")
    parts.wrap(core._scheduler, "update", "update")
    parts.wrap(runner, "_apply", "apply plan")
    parts.wrap(model_runner, "build_input_batch", "input batch")
    parts.wrap(runner._runnable, "run", "run")
    parts.wrap(runner, "_collect", "sample")
    parts.wrap(runner._constraints, "masks", "masks")
    parts.wrap(runner._constraints, "take", "take")
    params = SamplingParams(max_tokens=args.steps + 60, ignore_eos=True, **SAMPLING[args.sampling])
    if args.sampling == "json":
        executors[0].prepare_grammar(GRAMMAR).result()
    for number in range(args.requests):
        prompt = [1000 + 7 * number + 13 * i for i in range(32)]
        core.add_request(
            EngineCoreRequest(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                sampling_params=params,
                arrival_time=time.monotonic(),
                output=OutputOptions(grammar=GRAMMAR if args.sampling == "json" else None),
            )
        )
    for _ in range(20):
        core.step()
    steps = run_steps(core, args, parts)
    core.shutdown()
    report(parts, steps, args)


def run_steps(core: Any, args: argparse.Namespace, parts: Parts) -> list[float]:
    """Seconds of each step; every request gets a token in each."""
    import msgspec

    encoder, steps = msgspec.msgpack.Encoder(), []
    parts.clear()
    for _ in range(args.steps):
        start = time.perf_counter()
        outputs = core.step()
        steps.append(time.perf_counter() - start)
        before = time.thread_time()
        encoder.encode(outputs)
        parts.cpu["encode message"].append(time.thread_time() - before)
        assert len(outputs.outputs) == args.requests
    return steps


def report(parts: Parts, steps: list[float], args: argparse.Namespace) -> None:
    setting = f"{args.requests} requests, {args.sampling}, {args.threads} threads, depth {args.depth}"
    print(f"{setting}, load {os.getloadavg()[0]:.1f}")
    host = ("schedule", "apply plan", "input batch", "update", "encode message")
    total = least = 0.0
    for name in (*host, "sample"):
        micros, fewest = 1e6 * statistics.median(parts.cpu[name]), 1e6 * min(parts.cpu[name])
        if name in host:
            total, least = total + micros, least + fewest
        print(f"  {name:20s} {micros:8.0f} us CPU, least {fewest:.0f}")
    print(f"  {'host, without sample':20s} {total:8.0f} us CPU, least {least:.0f}")
    if parts.cpu["masks"]:
        masks, takes = (1e6 * sum(parts.cpu[name]) / len(steps) for name in ("masks", "take"))
        print(f"  {'of it grammars':20s} {masks:8.0f} us CPU on average for masks, {takes:.0f} to take tokens")
    for name in ("sample", "run"):
        print(f"  {name:20s} {1e6 * statistics.median(parts.wall[name]):8.0f} us wall")
    print(f"  {'step':20s} {1e6 * statistics.median(steps):8.0f} us wall")


# ---- the API process alone


class ReadyCore:
    """In the place of AsyncCoreClient: gives every running request a token each ``PACE`` seconds, as encoded bytes."""

    PACE = 0.004
    error = None
    pid = 0
    owes_since = None

    def __init__(self) -> None:
        import msgspec

        from octavo.engine.wire import CoreMessage

        self._left: dict[str, int] = {}
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(CoreMessage)

    def submit(self, requests: Any = (), abort_ids: Any = ()) -> None:
        for request in requests:
            self._left[request.request_id] = request.sampling_params.max_tokens
        for request_id in abort_ids:
            self._left.pop(request_id, None)

    async def outputs(self) -> Any:
        from octavo.engine.wire import CoreMessage
        from octavo.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats

        while True:
            await asyncio.sleep(self.PACE)
            if self._left:
                break
        outputs = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            ended = self._left[request_id] == 0
            reason = FinishReason.LENGTH if ended else None
            outputs.append(
                EngineCoreOutput(
                    request_id=request_id, new_token_ids=[1000 + self._left[request_id]], finish_reason=reason
                )
            )
            if ended:
                del self._left[request_id]
        stats = SchedulerStats(num_running=len(outputs), iteration_tokens=len(outputs))
        step = EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic(), stats=stats)
        return self._decoder.decode(self._encoder.encode(CoreMessage(outputs=step))).outputs

    def expect_answer(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass


async def serve_ready_core(args: argparse.Namespace) -> None:
    import uvicorn

    from octavo.args.engine_args import engine_config_from_kwargs
    from octavo.args.resolve import resolve_engine_config
    from octavo.engine.async_llm import AsyncLLM
    from octavo.entrypoints.app import build_app
    from octavo.entrypoints.server.state import ServedModel, ServerState
    from octavo.messages import EngineInfo
    from octavo.tokenizer import load_tokenizer

    config = resolve_engine_config(engine_config_from_kwargs(model=args.model), None)
    info = EngineInfo(max_model_len=2048, vocab_size=49152, num_blocks=9000, block_size=16, kv_cache_bytes=1 << 30)
    client: Any = ReadyCore()
    engine = AsyncLLM(config, [client], load_tokenizer(config.model.model), info)
    state = ServerState([ServedModel(args.model, engine)])
    options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none", "port": 0}
    http = uvicorn.Server(uvicorn.Config(build_app(state), **options))
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    command = [sys.executable, __file__, "client", "--requests", str(args.requests), "--tokens", str(args.tokens)]
    for run in range(args.runs + 1):
        before = time.process_time()
        process = await asyncio.create_subprocess_exec(*command, "--model", args.model, "--port", str(port))
        assert await process.wait() == 0
        spent = time.process_time() - before
        if run:  # the first one warms up
            print(f"{args.requests} streams: {1e6 * spent / args.requests / args.tokens:.1f} us CPU/token", flush=True)
    http.should_exit = True
    await serving
    await engine.shutdown()


def api(args: argparse.Namespace) -> None:
    if args.loop == "uvloop":
        import uvloop

        uvloop.run(serve_ready_core(args))
    else:
        asyncio.run(serve_ready_core(args))


def client(args: argparse.Namespace) -> None:
    asyncio.run(load(args.port, args))


# ---- the server


def cpu_seconds(pid: int) -> float:
    """Time that the threads of a process have run, to the nanosecond."""
    return 1e-9 * sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def child_of(pid: int) -> int:
    """The core: the only child of the API process."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        if children := path.read_text().split():
            return int(children[0])
    raise RuntimeError("the server has no core process")


async def stream(port: int, number: int, args: argparse.Namespace, gaps: list[float]) -> None:
    """One streaming request, read with as little of our own time as possible."""
    import json

    body = json.dumps(
        {
            "model": args.model,
            "prompt": [1000 + 7 * number + 13 * i for i in range(32)],
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "stream": True,
            **SAMPLING["greedy"],
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
    last = None
    while data := await reader.read(1 << 16):
        now = time.perf_counter()
        if last is not None and b"data: {" in data:
            gaps.append(now - last)
        last = now
    writer.close()


async def load(port: int, args: argparse.Namespace) -> tuple[float, list[float]]:
    gaps: list[float] = []
    start = time.perf_counter()
    await asyncio.gather(*(stream(port, number, args, gaps) for number in range(args.requests)))
    return time.perf_counter() - start, gaps


def server(args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", args.model, "--port", "0", *args.flags]
    command += ["--threads", str(args.threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        text = ""
        while "octavo is ready" not in text:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the server did not start")
            text += line
        found = re.search(r"http://[^:]+:(\d+)", text)
        assert found is not None
        port, core = int(found[1]), child_of(process.pid)
        asyncio.run(load(port, args))  # warm
        for _ in range(args.runs):
            before = [cpu_seconds(p) for p in (process.pid, core)]
            seconds, gaps = asyncio.run(load(port, args))
            api, engine = (cpu_seconds(p) - b for p, b in zip((process.pid, core), before))
            tokens = args.requests * args.tokens
            print(
                f"{args.requests} streams, {args.threads} threads: {tokens / seconds:7.0f} tokens/s, "
                f"gap p50 {1e3 * statistics.median(gaps):.1f} p99 {1e3 * sorted(gaps)[int(0.99 * len(gaps))]:.1f} ms, "
                f"API {1e6 * api / tokens:.0f} us CPU/token, core {1e6 * engine / tokens:.0f} us CPU/token, "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("engine", "api", "server", "client"))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="engine: decoding steps")
    parser.add_argument("--depth", type=int, default=1, help="engine: steps in flight")
    parser.add_argument("--sampling", choices=SAMPLING, default="greedy", help="engine: how tokens are chosen")
    parser.add_argument("--tokens", type=int, default=256, help="server: tokens of each answer")
    parser.add_argument("--runs", type=int, default=3, help="server: measured rounds")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="api: event loop")
    parser.add_argument("--port", type=int, default=0, help="client: where the server is (for api's own use)")
    parser.add_argument(
        "--flags",
        type=str.split,
        default=[],
        help='server: more flags of octavo serve, e.g. --flags="--pipeline-depth 2"',
    )
    args = parser.parse_args()
    {"engine": engine, "api": api, "server": server, "client": client}[args.what](args)


if __name__ == "__main__":
    main()
