"""``octavo bench startup``: from starting a server's process to its port, its readiness and its first token.

Works for any server with ``/health`` and ``/v1/completions``. Memory is read from /proc, over the process and all that
it started.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.exceptions import RequestError

POLL_SECONDS = 0.002
PROMPT = "The capital of France is"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def octavo_command(model: str, port: int, extra: Sequence[str] = ()) -> list[str]:
    """The command line that serves ``model`` under the name ``m``."""
    return [
        *(sys.executable, "-m", "octavo.cli.main", "serve", model),
        *("--port", str(port), "--served-model-name", "m", *extra),
    ]


def process_tree(pid: int) -> list[int]:
    """``pid`` and its living descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += process_tree(int(child))
    return found


def memory_bytes(pid: int) -> dict[str, int]:
    """``rss`` and ``peak_rss`` in bytes, summed over the process tree."""
    total = {"rss": 0, "peak_rss": 0}
    names = {"VmRSS": "rss", "VmHWM": "peak_rss"}
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in names:
                    total[names[name]] += int(value.split()[0]) * 1024
    return total


class ServerProcess:
    """A server started as a child in a process group of its own, with its output in a file; a context manager that
    stops it at the end."""

    def __init__(self, command: Sequence[str], port: int, env: dict[str, str] | None = None) -> None:
        self.port = port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop()
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def log_tail(self) -> str:
        """The last lines that the server wrote."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        return self._log.read().decode(errors="replace")

    def check_alive(self) -> None:
        """Raises RequestError, with the end of its output, if the server has ended."""
        if self.process.poll() is not None:
            raise RequestError(f"the server ended with status {self.process.returncode}:\n{self.log_tail()}")

    def health(self) -> int | None:
        """The status of /health; None while nothing answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait_until_ready(self, timeout: float) -> tuple[float, float]:
        """Seconds from the start until the port answered and until /health was 200. Raises RequestError."""
        answered = None
        while True:
            status = self.health()
            now = time.perf_counter() - self.started
            if status is not None and answered is None:
                answered = now
            if status == 200 and answered is not None:
                return answered, now
            self.check_alive()
            if now > timeout:
                raise RequestError(f"the server was not ready after {timeout:g} s:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def first_token(self, model: str, timeout: float = 120) -> float:
        """Ask for a streamed completion; seconds from the server's start to its first text. Raises RequestError."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RequestError(f"HTTP {response.status}: {response.read()[:300].decode(errors='replace')}")
            for line in response:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("text"):
                    return time.perf_counter() - self.started
        raise RequestError("the first answer has no text")

    def stop(self, seconds: float = 30) -> None:
        """Ask it to end; after that, or ``seconds``, kill what is left of its process group. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)  # one that is stopped would never see it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self._log.close()


def measure_startup(
    command: Sequence[str], port: int, *, model: str = "m", timeout: float = 300, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """One start: ``port_s``, ``ready_s``, ``first_token_s`` from the process's start, ``rss`` and ``peak_rss`` in bytes
    after the first answer. Raises RequestError if it does not come up."""
    with ServerProcess(command, port, env) as server:
        answered, ready = server.wait_until_ready(timeout)
        first = server.first_token(model, timeout)
        return {"port_s": answered, "ready_s": ready, "first_token_s": first, **memory_bytes(server.process.pid)}
