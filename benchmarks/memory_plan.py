"""What a full server takes beside what ``octavo plan`` said: ``python benchmarks/memory_plan.py MODEL [flags]``.

As many requests as run at once fill the KV cache; all have logprobs, a penalty and nucleus sampling, half of them a
grammar, half prompt logprobs. Memory is the sum of the processes' highest resident sets, pages that they
share counted in each, from the moment on when the server is ready (a first start packs weights before). Linux only.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octavo.bench.startup import ServerProcess, free_port, memory_bytes, octavo_command, process_tree

QUEUE = "32k"  # waiting tokens; a full queue is not what is measured here
OUTPUT = 16
PARTS = ("weights", "activations", "sampling", "kv_bytes", "processes", "total")


def plan_of(model: str, flags: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "octavo.cli.main", "plan", model, "--json", *flags]
    plan: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return plan


def ask(port: int, number: int, num_tokens: int) -> int:
    """One request of ``num_tokens``; the HTTP status."""
    prompt = random.Random(number).choices(range(1000, 40000), k=num_tokens - OUTPUT)
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0.7, "top_p": 0.9}
    body |= {"logprobs": 5, "repetition_penalty": 1.1, "ignore_eos": True}
    if number % 2 == 0:
        body["prompt_logprobs"] = 5
    if number % 2:
        body["structured_outputs"] = {"regex": "[a-z ]{400}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1800)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def main() -> None:
    model, flags = sys.argv[1], [*sys.argv[2:], "--max-num-queued-tokens", QUEUE]
    plan, port = plan_of(model, flags), free_port()
    with ServerProcess(octavo_command(model, port, flags), port) as server:
        server.wait_until_ready(600)
        for pid in process_tree(server.process.pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the highest resident set so far
        num_requests = 64
        num_tokens = min(plan["max_model_len"], max(2 * OUTPUT, plan["num_tokens"] // num_requests))
        with ThreadPoolExecutor(num_requests) as clients:
            statuses = list(clients.map(lambda number: ask(port, number, num_tokens), range(num_requests)))
        peak = memory_bytes(server.process.pid)["peak_rss"]
    if set(statuses) != {200}:
        sys.exit(f"statuses {sorted(set(statuses))}")
    mib = [f"{plan[part] / 2**20:.0f}" for part in PARTS]
    print(
        f"| {Path(model).stem} | {' | '.join(mib)} | {peak / 2**20:.0f} | {(plan['total'] / peak - 1) * 100:+.1f} % |"
    )


if __name__ == "__main__":
    main()
