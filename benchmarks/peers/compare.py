"""octavo beside its peers on one model, the same prompts and threads, taking turns in one run; medians and ratios.

    python benchmarks/peers/compare.py [--engines octavo,llama.cpp] [--work decode,serve-8] [--rounds 3] [--save F.json]

Every round runs every engine once, in an order that turns, with prompts of the round's own. The engines that are not
having their turn are stopped (SIGSTOP), so they take no processor time. Work without HTTP: decode (32 tokens in, the
time of 129 out less the time of 1), prefill (1,024 in, 1 out), offline (64 requests of 64 to 512 in, 128 out; tokens
out). Over HTTP, through octavo bench's client: serve-N (N users in a closed loop, 64 to 512 in, 128 out), prefix (64
requests of 512 shared and 32 own tokens, 16 users, 32 out), startup. Install the peers with install.py first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engines import Engine, default_peers_dir, make_engines

from octavo.bench.client import Client
from octavo.bench.datasets import DatasetConfig, make_dataset
from octavo.bench.figures import summarise
from octavo.bench.load import LoadConfig, send_load
from octavo.bench.machine import machine_facts
from octavo.bench.startup import ServerProcess, free_port, measure_startup
from octavo.catalog import resolve_model

MIXED = {"name": "random", "input_len": 288, "range_ratio": 224 / 288}  # 64 to 512
RUNNER_WORK = ("decode", "prefill", "offline")
SERVER_WORK = ("serve-1", "serve-8", "serve-32", "prefix")
WORK = (*RUNNER_WORK, *SERVER_WORK, "startup")
SHOWN = {  # figure -> (label, higher is better)
    "decode_tok_s": ("decode, tok/s", True),
    "prefill_tok_s": ("prefill, tok/s", True),
    "offline_out_tok_s": ("out tok/s", True),
    "output_throughput": ("out tok/s", True),
    "median_ttft_ms": ("TTFT p50, ms", False),
    "p99_itl_ms": ("ITL p99, ms", False),
    "first_token_s": ("start to first token, s", False),
    "rss": ("RSS, MB", False),
}


class Runner:
    """An engine in its own process and environment, spoken to in lines of JSON (runners/protocol.py)."""

    def __init__(self, engine: Engine, timeout: float) -> None:
        assert engine.runner is not None
        self._timeout = timeout
        self._process = subprocess.Popen(
            engine.runner,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | engine.env,
            start_new_session=True,
        )
        try:
            self.version: str = self._read()["version"]
        except RuntimeError:
            self.stop()
            raise

    def _read(self) -> dict[str, Any]:
        """The next line; an engine that takes longer than the timeout is killed."""
        assert self._process.stdout is not None
        timer = threading.Timer(self._timeout, self._kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        message: dict[str, Any] = json.loads(line) if line else {"error": "ended or took too long"}
        if "error" in message:
            raise RuntimeError(message["error"])
        return message

    def _kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Raises RuntimeError if the engine made another number of tokens than was asked for."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer["tokens"] != max_tokens * len(prompts):
            raise RuntimeError(f"{answer['tokens']} tokens instead of {max_tokens * len(prompts)}")
        return float(answer["seconds"])

    def stop(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._kill()  # also what it started and left behind
        self._process.wait()


@contextlib.contextmanager
def turn(send_signal: Callable[[int], None]) -> Iterator[None]:
    """Within, the engine runs; outside, it is stopped."""
    send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        send_signal(signal.SIGSTOP)


def prompts_of(seed: int, count: int, **lengths: Any) -> list[list[int]]:
    return [list(r.prompt) for r in make_dataset(DatasetConfig(num_prompts=count, seed=seed, **lengths))]


def run_offline(runner: Runner, work: str, seed: int, scale: int) -> dict[str, float]:
    """The figures of one turn. ``scale`` divides the number of requests and the lengths, to try the script."""
    if work == "decode":
        first, second = prompts_of(seed, 2, input_len=32)
        new = 128 // scale
        return {"decode_tok_s": new / (runner.seconds([second], 1 + new) - runner.seconds([first], 1))}
    if work == "prefill":
        tokens = 1024 // scale
        return {"prefill_tok_s": tokens / runner.seconds(prompts_of(seed, 1, input_len=tokens), 1)}
    prompts = prompts_of(seed, 64 // scale, **MIXED)
    return {"offline_out_tok_s": 128 // scale * len(prompts) / runner.seconds(prompts, 128 // scale)}


def run_llama_bench(engine: Engine, work: str, scale: int) -> dict[str, float]:
    """Decoding and prefill as llama.cpp measures itself, in a process that ends with it."""
    assert engine.llama_bench is not None
    sizes = ("-p", "0", "-n", str(128 // scale)) if work == "decode" else ("-p", str(1024 // scale), "-n", "0")
    done = subprocess.run([*engine.llama_bench, *sizes], capture_output=True, text=True, timeout=600, check=True)
    return {f"{work}_tok_s": json.loads(done.stdout)[0]["avg_ts"]}


def run_served(port: int, work: str, seed: int, scale: int) -> dict[str, Any]:
    """One load through octavo bench's client."""
    if work == "prefix":
        lengths = {"prefix_len": 512, "suffix_len": 32, "num_prefixes": 1, "prefix_output_len": 32}
        config = DatasetConfig(name="prefix-repetition", num_prompts=64 // scale, seed=seed, **lengths)
        users = 16
    else:
        users = int(work.partition("-")[2])
        count = max(6, 2 * users) // scale
        config = DatasetConfig(num_prompts=max(1, count), seed=seed, output_len=128 // scale, **MIXED)
    load = LoadConfig(model="m", max_concurrency=users, ignore_eos=True)
    outcome = asyncio.run(send_load(Client(f"http://127.0.0.1:{port}"), make_dataset(config), load))
    figures = summarise(outcome.records, outcome.duration)
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} failed: {next(r.error for r in outcome.records if r.error)}")
    return figures


class Comparison:
    """Runs the work in rounds and keeps every figure: results[work][engine] is a list with one dict a round."""

    def __init__(self, engines: list[Engine], args: argparse.Namespace) -> None:
        self.engines, self.args = engines, args
        self.results: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self.versions: dict[str, str] = {}
        self.failures: dict[str, str] = {}

    def rounds(self, work: str, turns: dict[str, Callable[[int], dict[str, Any]]], warmups: int = 1) -> None:
        """Every engine once a round, in an order that turns; one that fails is out of this work."""
        turns = dict(turns)
        first_seed = 1000 * WORK.index(work)  # no two pieces of work share prompts: a prefix cache would find them
        for number in range(warmups + self.args.rounds):
            names = list(turns)
            for name in names[number % len(names) :] + names[: number % len(names)] if names else []:
                try:
                    figures = turns[name](first_seed + number)
                except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                    self.fail(name, work, error)
                    del turns[name]
                    continue
                if number >= warmups:
                    self.results.setdefault(work, {}).setdefault(name, []).append(figures)
                    print(f"{work} {number - warmups + 1}: {name} {json.dumps(short(figures))}", flush=True)

    def fail(self, name: str, work: str, error: Exception) -> None:
        self.failures[f"{name} {work}"] = str(error)
        print(f"{name}, {work}: {error}", file=sys.stderr, flush=True)

    def offline(self, works: list[str]) -> None:
        runners: dict[str, Runner] = {}
        try:
            for engine in self.engines:
                if engine.runner is not None:
                    try:
                        runners[engine.name] = Runner(engine, self.args.timeout)
                    except RuntimeError as error:
                        self.fail(engine.name, "start", error)
                        continue
                    self.versions[engine.name] = runners[engine.name].version
                    runners[engine.name].signal(signal.SIGSTOP)
            for work in works:
                self.rounds(work, self._offline_turns(runners, work))
        finally:
            for runner in runners.values():
                runner.stop()

    def _offline_turns(self, runners: dict[str, Runner], work: str) -> dict[str, Callable[[int], dict[str, Any]]]:
        def take(runner: Runner) -> Callable[[int], dict[str, Any]]:
            def one(seed: int) -> dict[str, Any]:
                with turn(runner.signal):
                    return run_offline(runner, work, seed, self.args.scale)

            return one

        turns = {name: take(runner) for name, runner in runners.items()}
        for engine in self.engines:
            if engine.llama_bench is not None and work != "offline":
                turns[engine.name] = lambda _, engine=engine: run_llama_bench(engine, work, self.args.scale)  # type: ignore[misc]
        return turns

    def served(self, works: list[str]) -> None:
        with contextlib.ExitStack() as stack:
            servers: dict[str, ServerProcess] = {}
            for engine in self.engines:
                if engine.server is None:
                    continue
                port = free_port()
                server = stack.enter_context(ServerProcess(engine.server(port), port, os.environ | engine.env))
                try:
                    server.wait_until_ready(self.args.timeout)
                except Exception as error:
                    self.fail(engine.name, "start", error)
                    continue
                servers[engine.name] = server
                os.killpg(server.process.pid, signal.SIGSTOP)
            for work in works:
                self.rounds(work, {name: self._served_turn(server, work) for name, server in servers.items()})
            for server in servers.values():
                os.killpg(server.process.pid, signal.SIGCONT)

    def _served_turn(self, server: ServerProcess, work: str) -> Callable[[int], dict[str, Any]]:
        def one(seed: int) -> dict[str, Any]:
            with turn(lambda number: os.killpg(server.process.pid, number)):
                try:
                    return run_served(server.port, work, seed, self.args.scale)
                except Exception as error:
                    raise RuntimeError(str(error)) from error

        return one

    def startup(self) -> None:
        def start(engine: Engine) -> Callable[[int], dict[str, Any]]:
            def one(seed: int) -> dict[str, Any]:
                assert engine.server is not None
                port = free_port()
                try:
                    figures = measure_startup(
                        engine.server(port), port, timeout=self.args.timeout, env=os.environ | engine.env
                    )
                except Exception as error:
                    raise RuntimeError(str(error)) from error
                return figures | {"rss": figures["rss"] / 1e6, "peak_rss": figures["peak_rss"] / 1e6}

            return one

        self.rounds("startup", {e.name: start(e) for e in self.engines if e.server is not None})


def short(figures: dict[str, Any]) -> dict[str, float]:
    return {name: round(figures[name], 3) for name in SHOWN if figures.get(name) is not None}


def medians(results: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """work -> figure -> engine -> median over the rounds."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for work, by_engine in results.items():
        for engine, rounds in by_engine.items():
            for name in short(rounds[0]):
                row = table.setdefault(work, {}).setdefault(name, {})
                row[engine] = statistics.median(figures[name] for figures in rounds)
    return table


def markdown(table: dict[str, dict[str, dict[str, float]]], facts: dict[str, Any]) -> str:
    """Rows for RESULTS.md. The ratio is to the best peer; above 1 octavo is ahead."""
    machine, lines = f"{facts['cpu']}, {facts['physical_cores']} cores", []
    for work, figures in table.items():
        for name, row in figures.items():
            label, higher = SHOWN[name]
            ours = row.get("octavo")
            peers = {engine: value for engine, value in row.items() if engine != "octavo"}
            if ours is None or not peers:
                continue
            best = max(peers.values()) if higher else min(peers.values())
            ratio = ours / best if higher else best / ours
            others = ", ".join(f"{engine} {value:.4g}" for engine, value in peers.items())
            lines.append(
                f"| {work}: {label} | {ours:.4g} | {others} | {ratio:.2f} | `peers/compare.py --work {work}` "
                f"| {facts['date'][:10]} | {machine} |"
            )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="octavo,llama.cpp,llama.cpp-q4_0,openvino,transformers,vllm")
    parser.add_argument("--work", default=",".join(WORK), help=f"of {', '.join(WORK)}")
    parser.add_argument("--model", default="smollm2-135m", help="catalogue name or GGUF file")
    parser.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one answer or one start")
    parser.add_argument(
        "--scale", type=int, default=1, help="divide the work, to try the script; no figures for a table"
    )
    parser.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    parser.add_argument("--save", type=Path, help="every round's figures and the machine as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse()
    known = make_engines(args.peers_dir, resolve_model(args.model, None, None), args.threads)
    works = args.work.split(",")
    if unknown := (set(args.engines.split(",")) - set(known)) | (set(works) - set(WORK)):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}")
    engines = [known[name] for name in args.engines.split(",")]
    for engine in [engine for engine in engines if not engine.needs.exists()]:
        print(f"{engine.name} is left out: no {engine.needs} (install.py)", file=sys.stderr)
        engines.remove(engine)
    comparison = Comparison(engines, args)
    if chosen := [work for work in works if work in RUNNER_WORK]:
        comparison.offline(chosen)
    if chosen := [work for work in works if work in SERVER_WORK]:
        comparison.served(chosen)
    if "startup" in works:
        comparison.startup()
    facts, table = machine_facts(), medians(comparison.results)
    command = " ".join(["python benchmarks/peers/compare.py", *sys.argv[1:]])
    print("\n" + markdown(table, facts))
    if args.save is not None:
        whole = {"command": command, "machine": facts, "versions": comparison.versions, "medians": table}
        whole |= {"rounds": comparison.results, "failures": comparison.failures}
        args.save.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
