"""A25: every admitted sequence is counted once, however it ends; counters only grow, and are what clients saw."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests import patient
from tests.cases.asking import answered, ask, refused
from tests.server.running_server import RunningServer

SAMPLE = re.compile(r"^(\w+:\w+)(?:{(.*)})? (\S+)$", re.MULTILINE)
PER_SEQUENCE = ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens")


def read(server: RunningServer) -> dict[tuple[str, str], float]:
    """Every sample that may only grow, by name and labels."""
    text = patient.get(f"{server.url}/metrics").text
    kept = ("_total", "_count", "_sum", "_bucket")
    return {(name, labels): float(value) for name, labels, value in SAMPLE.findall(text) if name.endswith(kept)}


class Growth:
    """What has been counted since it was made."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self._before = server, read(server)

    def of(self, name: str, label: str = "") -> float:
        """Of the samples of ``name`` whose labels hold ``label``."""
        after = read(self.server)
        keys = [key for key in after if key[0] == f"vllm:{name}" and label in key[1]]
        assert keys, name
        return sum(after[key] - self._before.get(key, 0.0) for key in keys)

    def ended(self) -> dict[str, float]:
        reasons = ("stop", "length", "abort", "error", "repetition")
        return {r: n for r in reasons if (n := self.of("request_success_total", f'finished_reason="{r}"'))}


@contextlib.contextmanager
def watched(server: RunningServer) -> Iterator[None]:
    """Within, /metrics is read all the time; nothing in it may ever decrease, nor hits exceed queries."""
    stop, faults = threading.Event(), []

    def watch() -> None:
        last: dict[tuple[str, str], float] = defaultdict(float)
        while not stop.is_set():
            now = read(server)
            faults.extend((key, last[key], value) for key, value in now.items() if value < last[key])
            totals: dict[str, float] = defaultdict(float)
            for (name, _), value in now.items():
                totals[name] += value
            if totals["vllm:prefix_cache_hits_total"] > totals["vllm:prefix_cache_queries_total"]:
                faults.append((("hits > queries", ""), 0, 0))
            last.update(now)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert faults == []


def leave(server: RunningServer, **fields: Any) -> None:
    """Ask for a stream, read its beginning, and go."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    body = {"stream": True, "ignore_eos": True, "max_tokens": 900, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().read(1)
    connection.close()


def test_each_end_is_counted_once(live_server: RunningServer) -> None:
    growth = Growth(live_server)
    with watched(live_server), ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(leave, live_server, prompt=f"{i} is") for i in range(5)]
        jobs += [
            pool.submit(ask, live_server, prompt=f"{i}, 1, 2, 3,", stop=[" "], max_tokens=50, temperature=0)
            for i in range(5)
        ]
        jobs += [pool.submit(ask, live_server, prompt="x", ignore_eos=True, max_tokens=3 + i) for i in range(3)]
        jobs += [pool.submit(ask, live_server, prompt="x", ignore_eos=True, max_tokens=7, n=2)]
        bodies = [answered(job.result()) for job in jobs[5:]]
        refused(ask(live_server, prompt="x", temperature=-1), "temperature")
        refused(ask(live_server, prompt="x", max_tokens=10**6), "max_tokens")
        live_server.wait_until_idle()
    assert growth.ended() == {"abort": 5, "stop": 5, "length": 5}
    for name in PER_SEQUENCE:
        assert growth.of(f"{name}_count") == 15, name
    assert growth.of("request_params_n_count") == 14  # requests, not samples
    answered_tokens = sum(body["usage"]["completion_tokens"] for body in bodies)
    left_tokens = growth.of("request_generation_tokens_sum") - answered_tokens
    assert left_tokens >= 5  # each was left after its first token
    assert growth.of("generation_tokens_total") == answered_tokens + left_tokens
    once_more = bodies[-1]["usage"]["prompt_tokens"]  # the second sample has a prompt, which was computed for the first
    assert growth.of("prompt_tokens_total") == growth.of("request_prompt_tokens_sum") - once_more
    assert growth.of("prompt_tokens_by_source_total") == growth.of("prompt_tokens_total")


def test_preempted_and_cached_tokens_add_up(live_server: RunningServer) -> None:
    """More than the pool holds, with a beginning in common: preemptions, and their lookups in the cache, count once."""
    growth = Growth(live_server)
    prompt = "All of these begin with the same words, so that they share their first blocks. " * 8
    with watched(live_server), ThreadPoolExecutor(12) as pool:
        fields = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
        jobs = [pool.submit(ask, live_server, prompt=f"{prompt}{i}", **fields) for i in range(12)]
        bodies = [answered(job.result()) for job in jobs]
        live_server.wait_until_idle()
    assert growth.of("num_preemptions_total") > 0, "the pool is not small enough"
    assert growth.ended() == {"length": 12}
    usages = [body["usage"] for body in bodies]
    assert growth.of("generation_tokens_total") == 12 * 300
    assert growth.of("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    assert growth.of("prompt_tokens_cached_total") == cached
    assert growth.of("prompt_tokens_by_source_total", 'source="local_cache_hit"') == cached
    assert growth.of("request_prefill_kv_computed_tokens_sum") == growth.of("prompt_tokens_total") - cached
    assert growth.of("prefix_cache_hits_total") == cached
    assert growth.of("request_num_preemptions_sum") == growth.of("num_preemptions_total")


def test_an_end_before_the_first_token_is_counted_too(live_server: RunningServer) -> None:
    growth = Growth(live_server)
    connection = http.client.HTTPConnection(live_server.url.removeprefix("http://"))
    body = json.dumps({"prompt": "word " * 900, "max_tokens": 5})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    live_server.wait_until(lambda: live_server.metric("vllm:num_requests_running") == 1)
    connection.close()
    live_server.wait_until_idle()
    assert growth.ended() == {"abort": 1}
    for name in PER_SEQUENCE:
        assert growth.of(f"{name}_count") == 1, name
    assert growth.of("generation_tokens_total") == growth.of("request_generation_tokens_sum")
