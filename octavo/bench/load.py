"""Sends a dataset to a server: when, how many at a time, and what came of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.client import Capture, Client, read_answer
from octavo.bench.datasets import BenchRequest, as_text
from octavo.bench.figures import RequestRecord
from octavo.exceptions import ConfigError, RequestError

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
CAPTURE_BYTES = 64 << 20  # finished answers are taken apart when they hold more than this


@dataclass(frozen=True)
class LoadConfig:
    """How to ask. ``request_rate`` in requests/s, infinite: all at once. ``burstiness`` is the shape of the gamma
    distribution of the gaps: 1 is a Poisson process, less comes in bursts, more is steadier."""

    backend: str = "openai"
    model: str = ""
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 1
    ignore_eos: bool = False
    temperature: float = 0.0
    continuous_usage: bool = False
    as_words: bool = False  # send the prompt as text
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass
class LoadResult:
    """Records in the dataset's order; ``duration`` and ``client_cpu`` (of this process) in seconds."""

    records: list[RequestRecord]
    duration: float
    client_cpu: float


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent; all 0 for an infinite rate. Raises ConfigError."""
    if rate <= 0 or burstiness <= 0:
        raise ConfigError(f"--request-rate and --burstiness must be above 0, got {rate:g} and {burstiness:g}")
    if rate == float("inf"):
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def request_body(request: BenchRequest, config: LoadConfig) -> dict[str, Any]:
    """The JSON body of a streaming request."""
    options: dict[str, Any] = {"include_usage": True}
    if config.continuous_usage:
        options["continuous_usage_stats"] = True
    body: dict[str, Any] = {"model": config.model, "temperature": config.temperature, "stream": True}
    body |= {"stream_options": options, "max_tokens": request.output_len}
    if config.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": as_text(request.prompt)}]
    else:
        body["prompt"] = as_text(request.prompt) if config.as_words else list(request.prompt)
    if config.ignore_eos:
        body["ignore_eos"] = True
    return body | config.extra_body


async def wait_until_ready(client: Client, seconds: float) -> None:
    """Return once the server lists its models. Raises RequestError if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        status, _ = await client.get_json("/health")
        if status == 404 or (status is not None and status < 300):  # a server may have no /health
            status, _ = await client.get_json("/v1/models")
            if status == 200:
                return
            if status in (401, 403):
                raise RequestError(f"the server refuses the API key (HTTP {status})")
        if time.monotonic() > deadline:
            what = "does not answer" if status is None else f"answers HTTP {status}"
            raise RequestError(f"the server at {client.host}:{client.port} {what} after {seconds:g} s")
        await asyncio.sleep(0.1)


async def first_model(client: Client) -> str:
    """The name of the server's first model. Raises RequestError if it lists none."""
    _, body = await client.get_json("/v1/models")
    try:
        return str(body["data"][0]["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise RequestError("the server lists no model: give --model") from error


async def send_load(
    client: Client, dataset: Sequence[BenchRequest], config: LoadConfig, on_done: Callable[[], None] = lambda: None
) -> LoadResult:
    """Warm up, then send every request of ``dataset``. ``on_done`` is called as each one ends.

    Raises RequestError if a warm-up request fails: then nothing could be measured.
    """
    path = PATHS[config.backend]
    encoded = [client.encode("POST", path, request_body(request, config)) for request in dataset]
    for number in range(config.num_warmups):
        first = dataset[number % len(dataset)]
        # the prompt reversed: of the same length, but no prefix that the measured requests could reuse
        warm = BenchRequest(first.prompt[::-1], min(first.output_len, 8))
        record = read_answer(await client.exchange(client.encode("POST", path, request_body(warm, config))))
        if record.error is not None:
            raise RequestError(f"the warm-up request failed: {record.error}")
    times = arrival_times(len(dataset), config.request_rate, config.burstiness, config.seed)
    slots = asyncio.Semaphore(config.max_concurrency or len(dataset))
    results = _Results(len(dataset))

    async def send(index: int, start: float) -> None:
        await asyncio.sleep(max(0.0, start + times[index] - time.perf_counter()))
        async with slots:
            results.add(index, await client.exchange(encoded[index], len(dataset[index].prompt)))
        on_done()

    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(send(index, start) for index in range(len(dataset))))
    duration, cpu = time.perf_counter() - start, time.process_time() - cpu
    return LoadResult(results.finish(), duration, cpu)


class _Results:
    """Answers by index: raw while that is cheap to keep, else taken apart."""

    def __init__(self, count: int) -> None:
        self._raw: dict[int, Capture] = {}
        self._bytes = 0
        self._records: list[RequestRecord | None] = [None] * count

    def add(self, index: int, capture: Capture) -> None:
        self._raw[index] = capture
        self._bytes += sum(len(data) for _, data in capture.pieces)
        if self._bytes > CAPTURE_BYTES:
            self._read()

    def _read(self) -> None:
        for index, capture in self._raw.items():
            self._records[index] = read_answer(capture)
        self._raw.clear()
        self._bytes = 0

    def finish(self) -> list[RequestRecord]:
        self._read()
        return [record for record in self._records if record is not None]
