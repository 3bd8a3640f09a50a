"""Seconds from starting ``octavo serve`` to the port, to readiness and to the first streamed token.

    python benchmarks/startup.py [--model NAME] [--runs 5]

The model must be in the cache (``octavo pull NAME``). Each run is a new process, asked as soon as its port answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def get_status(port: int) -> int | None:
    """Status of /health, or None while nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def first_token(port: int, model: str) -> None:
    """Return once the first content of a streamed chat answer arrives."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            break
    connection.close()


def resident_bytes(pid: int) -> int:
    """RSS of the process and its children, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    total = sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return total + sum(resident_bytes(int(child)) for child in children)


def one_run(model: str) -> dict[str, float]:
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", str(port)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result = {}
    try:
        while (status := get_status(port)) is None:
            assert process.poll() is None, "the server ended"
            time.sleep(0.002)
        result["port answers"] = time.perf_counter() - start
        while status != 200:
            assert process.poll() is None, "the server ended"
            time.sleep(0.002)
            status = get_status(port)
        result["ready"] = time.perf_counter() - start
        first_token(port, model)
        result["first token"] = time.perf_counter() - start
        result["RSS, MB"] = resident_bytes(process.pid) / 1e6
    finally:
        process.terminate()
        process.wait(60)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    runs = [one_run(args.model) for _ in range(args.runs)]
    for name in runs[0]:
        values = [run[name] for run in runs]
        print(f"{name:14s} median {statistics.median(values):8.2f}   {min(values):.2f} .. {max(values):.2f}")


if __name__ == "__main__":
    main()
