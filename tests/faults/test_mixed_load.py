"""All at once against a real server: tenants, priorities, deadlines, aborts, bad requests, cores that are killed.

Whatever happens to a request, it is one of the things that may; what is answered is answered right; and afterwards the
server is as it was. ``python -m tests.faults.test_mixed_load MODEL [SECONDS [SEED]]`` does it for longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests import patient
from tests.server.running_server import RunningServer, running_server

SEATS, QUEUE, CLIENTS, MOST_OF_B = 4, 24, 16, 8
FLAGS = (
    f"--served-model-name m --max-model-len 512 --kv-cache-memory 12MiB --max-num-seqs {SEATS} "
    f"--max-num-queued-reqs {QUEUE} --max-core-restarts 1000 --core-restart-backoff 0 --shutdown-timeout 5 "
    "--slow-client-timeout 5"
).split()
TENANTS = f"""
[tenants.a]
weight = 3
max_running = 3
[tenants.b]
max_queued = {MOST_OF_B}
max_tokens = 100
priority = [0, 3]
"""
PROMPTS = ["Once upon a time", "The capital of France is", "1, 2, 3, 4,", "def f(x):"]
LAST_PROMPT = "The sun rises in the"
LENGTH = 24  # tokens of an answer whose text is known
BAD: list[dict[str, Any]] = [
    {"timeout": 0},
    {"timeout": -1},
    {"timeout": 1e9},
    {"n": 0},
    {"priority": 2**70},
    {"max_tokens": -1},
    {"prompt": [10**9]},
    {"best_of": 3},
    {"stop": ""},
    {"structured_outputs": {"regex": "("}},
]
MAY_FAIL = {400, 429, 500, 503, 504}


class Load:
    """One run: ``seen`` counts what became of the requests, ``wrong`` lists what should not have."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)
        self.http = httpx.AsyncClient(base_url=server.url, timeout=patient.SECONDS, limits=httpx.Limits())
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.right: dict[str, str] = {}
        self.deaths = 0

    async def know(self) -> None:
        """What the server answers while it has nothing else to do."""
        for prompt in (*PROMPTS, LAST_PROMPT):
            self.right[prompt] = (await self.post(self.plain(prompt)))["choices"][0]["text"]

    @staticmethod
    def plain(prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}

    async def post(self, body: dict[str, Any], tenant: str = "c") -> Any:
        answer = await self.http.post("/v1/completions", json=body, headers={"X-Tenant": tenant})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def body(self) -> dict[str, Any]:
        rng = self.random
        body = self.plain(rng.choice(PROMPTS)) | {"stream": rng.random() < 0.5}
        kind = rng.random()
        if kind < 0.1:
            body |= rng.choice(BAD)
        elif kind < 0.2:
            body |= {"n": rng.choice([2, 6]), "temperature": 1, "max_tokens": rng.randint(1, 60)}
        elif kind < 0.3:
            body |= {"n": 1, "best_of": rng.choice([2, 6]), "use_beam_search": True, "max_tokens": rng.randint(1, 12)}
        elif kind < 0.4:
            body |= {"prompt": PROMPTS, "n": 2, "max_tokens": rng.randint(1, 20)}
        elif kind < 0.5:
            body |= {"prompt": [rng.randrange(1000) for _ in range(rng.randint(100, 450))]}
        elif kind < 0.6:
            body |= {"structured_outputs": {"regex": rng.choice(["[a-z ]{4,20}", "(yes|no)"])}}
        if rng.random() < 0.3:
            body["priority"] = rng.randint(0, 3)
        if rng.random() < 0.3:
            body["timeout"] = rng.choice([0.01, 0.1, 0.5, 2.0])
        return body

    async def client(self, number: int, until: float) -> None:
        while time.monotonic() < until:
            name = f"c{number}-{self.random.randrange(10**9)}"
            body, headers = self.body(), {"X-Tenant": self.random.choice("abc"), "X-Request-Id": name}
            asking = asyncio.ensure_future(self.ask(body, headers))
            if (fate := self.random.random()) < 0.3:
                await asyncio.wait({asking}, timeout=self.random.choice([0.0, 0.05, 0.3, 1.0]))
                if fate < 0.2:
                    asking.cancel()  # closes the connection
                    self.seen["left"] += 1
                else:
                    self.seen[f"delete {(await self.http.delete(f'/v1/requests/{name}')).status_code}"] += 1
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    await asking
                except Exception as error:
                    self.wrong.append(f"{error!r} for {body}")

    async def ask(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            self.seen[str(answer.status_code)] += 1
            text = "".join([part async for part in answer.aiter_text()])
        if answer.status_code != 200:
            self.check_error(answer.status_code, json.loads(text)["error"], body)
            if answer.status_code in (429, 503):
                if not 1 <= int(answer.headers["retry-after"]) <= 600:
                    self.wrong.append(f"Retry-After: {answer.headers['retry-after']}, {text}")
                await asyncio.sleep(0.3)
            return
        if not body["stream"]:
            self.check_text(body, [json.loads(text)])
            return
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        if not events or events[-1] != "[DONE]":
            self.wrong.append(f"a stream without its end: {events[-2:]}")
            return
        chunks = [json.loads(event) for event in events[:-1]]
        if chunks and "error" in chunks[-1]:
            self.check_error(chunks[-1]["error"]["code"], chunks[-1]["error"], body)
        else:
            self.check_text(body, chunks)

    def check_error(self, status: int, error: dict[str, Any], body: dict[str, Any]) -> None:
        self.seen[f"error {status}"] += 1
        deadly = status == 500 and "the engine core" not in error["message"]
        if status not in MAY_FAIL or error["code"] != status or deadly:
            self.wrong.append(f"{status} {error} for {body}")
        if any(body.items() >= bad.items() for bad in BAD) and status not in (400, 429, 503):
            self.wrong.append(f"a bad request got {status} {error}: {body}")

    def check_text(self, body: dict[str, Any], chunks: list[Any]) -> None:
        """A greedy answer is the one that is known, or the beginning of it if somebody has ended it."""
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        aborted = any(choice["finish_reason"] == "abort" for choice in choices)
        if not any(choice["finish_reason"] for choice in choices):
            self.wrong.append(f"no finish_reason: {body}")
        extra = {"n", "best_of", "structured_outputs"} & body.keys()
        if extra or body["prompt"] not in PROMPTS:
            return
        text, right = "".join(choice["text"] for choice in choices), self.right[body["prompt"]]
        if not right.startswith(text) or (text != right and not aborted):
            self.wrong.append(f"{text!r} instead of {right!r} for {body}")
        self.seen["right"] += 1

    async def kill_cores(self, until: float) -> None:
        """At any moment of their lives, loading included."""
        while time.monotonic() < until:
            await asyncio.sleep(self.random.uniform(1.0, 6.0))
            for pid in cores(self.server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.deaths += 1

    async def run(self, seconds: float) -> None:
        await self.know()
        until = time.monotonic() + seconds
        await asyncio.gather(self.kill_cores(until), *(self.client(number, until) for number in range(CLIENTS)))

    async def check_afterwards(self) -> None:
        """It serves, all blocks are free, nothing is counted that is not there, and what is right is so still."""
        while (await self.http.get("/health")).status_code != 200:
            assert self.server.process.poll() is None, self.server.output
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.server.wait_until_idle)
        tenants = ["b"] * MOST_OF_B + ["c"] * (SEATS + QUEUE - MOST_OF_B)  # as many as may wait, and no fewer
        body = self.plain(LAST_PROMPT)
        for answer in await asyncio.gather(*(self.post(body, tenant) for tenant in tenants)):
            assert answer["choices"][0]["text"] == self.right[LAST_PROMPT]
        await asyncio.to_thread(self.server.wait_until_idle)
        await self.http.aclose()


def cores(server: RunningServer) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"core_proc" in command_of(pid)]


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def run(model: str, policy: str, seconds: float, seed: int, folder: Path) -> Load:
    (folder / "tenants.toml").write_text(TENANTS)
    flags = ["--tenants", str(folder / "tenants.toml"), "--tenant-header", "X-Tenant", "--scheduling-policy", policy]
    with running_server(model, *FLAGS, *flags) as server:
        server.wait_until_ready()

        async def all_of_it() -> Load:
            load = Load(server, seed)
            await load.run(seconds)
            await load.check_afterwards()
            return load

        load = asyncio.run(all_of_it())
        assert server.stop() == 0
    assert "Traceback" not in server.output, server.output
    return load


def test_mixed_load(smollm2_path: str, tmp_path: Path) -> None:
    load = run(smollm2_path, "priority", 6, 1, tmp_path)
    assert not load.wrong, "\n".join(load.wrong)
    assert load.deaths
    assert load.seen["right"]
    assert load.seen["429"]


if __name__ == "__main__":
    model, seconds, seed = sys.argv[1], *map(int, [*sys.argv[2:], 30, 0][:2])
    for policy in ("priority", "fair", "fcfs"):
        with tempfile.TemporaryDirectory() as name:
            done = run(model, policy, seconds, seed, Path(name))
        print(
            policy, done.deaths, "cores were killed;", dict(done.seen.most_common()), *done.wrong, sep="\n", flush=True
        )
