"""A real ``octavo serve`` in a process of its own, on a free loopback port."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai

from tests import patient

ROOT = Path(__file__).parents[2]
START_SECONDS = 120
SETTLE_SECONDS = 60


class RunningServer:
    """The process, its address, and what it has printed."""

    def __init__(self, *argv: str, module: str = "octavo.cli.main") -> None:
        threads = ("--threads", "1")  # of two: the other processor runs other tests
        command = [sys.executable, "-m", module, "serve", *threads, *argv, "--port", "0"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        self.lines: list[str] = []
        self._printed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for_line(r"listens on (\S+), ")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._printed:
                self.lines.append(line)
                self._printed.notify_all()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for_line(self, pattern: str) -> str:
        """The first group of ``pattern`` as soon as a line has it."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.output)

        with self._printed:
            assert self._printed.wait_for(lambda: found() or self.process.poll() is not None, START_SECONDS)
        match = found()
        assert match is not None, self.output
        return match[1]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while patient.get(f"{self.url}/health").status_code != 200:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have ``labels``."""
        total = 0.0
        for line in patient.get(f"{self.url}/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    def wait_until_idle(self) -> None:
        """Nothing runs, nothing waits, no block is referenced."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        self.wait_until(lambda: sum(self.metric(name) for name in names) == 0)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, patient.get(f"{self.url}/metrics").text
            time.sleep(0.02)

    def stop(self) -> int:
        """Ask to end; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join(10)
        return status


@contextlib.contextmanager
def running_server(*argv: str, module: str = "octavo.cli.main") -> Iterator[RunningServer]:
    """``module`` is run in the place of octavo's own command line."""
    server = RunningServer(*argv, module=module)
    try:
        yield server
    finally:
        server.stop()
