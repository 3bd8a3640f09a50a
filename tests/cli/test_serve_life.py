"""The server's life: start-up, failed starts, draining, a dead engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import patient
from tests.server.running_server import RunningServer, running_server

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--served-model-name",
    "m",
    "--max-model-len",
    "512",
    "--kv-cache-memory",
    "64MiB",
    "--shutdown-timeout",
    "100",
)


def serve(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def server(smollm2_path: str) -> Iterator[RunningServer]:
    with running_server(smollm2_path, *FLAGS) as server:
        server.wait_until_ready()
        yield server


def test_the_port_answers_before_the_model_is_there_and_the_screen_tells_all(smollm2_path: str) -> None:
    with running_server(smollm2_path, *FLAGS) as server:
        early = patient.get(f"{server.url}/health")
        assert early.status_code == 503
        assert early.json()["status"] == "loading"
        assert early.json()["phase"]
        server.wait_until_ready()
        server.wait_for_line(r"(address .*)")
        for fact in ("kernels", "weights", "KV cache", "blocks of 16", "start-up", f"{server.url}/v1"):
            assert fact in server.output
        assert server.stop() == 0


def test_sigterm_while_loading_is_an_orderly_end(smollm2_path: str) -> None:
    with running_server(smollm2_path, *FLAGS) as server:
        assert server.stop() == 0
    assert "is ready" not in server.output


def test_a_missing_model_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = serve(f"{tmp_path}/none.gguf", "--port", "0")
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_model_is_one_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    done = serve(f"{tmp_path}/broken.gguf", "--port", "0")
    assert done.returncode == 1
    assert "octavo serve: " in done.stderr
    assert "broken.gguf" in done.stderr


def test_a_port_in_use_and_a_wrong_flag_are_status_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve("--port", str(port))
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert serve("--block-size", "17").returncode == 2
    assert serve("--no-such-flag").returncode == 2


def test_sigterm_lets_running_requests_finish(server: RunningServer) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        fields = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        answers.append(patient.post(f"{server.url}/v1/completions", json=fields))

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
    assert server.stop() == 0
    thread.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 100
    with pytest.raises(httpx.ConnectError):
        patient.get(f"{server.url}/health")


def test_a_draining_server_listens_and_refuses_and_ends_the_rest_at_the_limit(smollm2_path: str) -> None:
    flags = list(FLAGS)
    flags[flags.index("--shutdown-timeout") + 1] = "2"
    body = {"prompt": "Once", "max_tokens": 480, "n": 16, "ignore_eos": True, "stream": True}
    with running_server(smollm2_path, *flags) as server:
        server.wait_until_ready()
        with (
            patient.Client() as kept,
            patient.stream("POST", f"{server.url}/v1/completions", json=body) as stream,
        ):
            assert kept.get(f"{server.url}/health").status_code == 200
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_line("(a second signal stops at once)")
            told = kept.get(f"{server.url}/health")
            assert (told.status_code, told.json()["status"]) == (503, "draining")
            refused = patient.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert int(refused.headers["retry-after"]) > 0
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"code":503' in rest[-2]
        assert "the server is shutting down" in rest[-2]
        assert server.process.wait(60) == 0


def test_a_second_signal_stops_at_once(server: RunningServer) -> None:
    fields = {"prompt": "Once", "max_tokens": 480, "n": 16, "ignore_eos": True, "stream": True}
    received = 0
    with (
        contextlib.suppress(httpx.RemoteProtocolError),
        patient.stream("POST", f"{server.url}/v1/completions", json=fields) as response,
    ):
        for received, _ in enumerate(response.iter_lines()):
            if received == 1:
                server.process.send_signal(signal.SIGTERM)
                server.wait_for_line("(a second signal stops at once)")
                server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert received < 480 * 16


def core_of(server: RunningServer) -> int:
    """Process id of the engine core."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (core,) = [pid for pid in children if b"core_proc" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(core)


def test_a_dead_engine_core_is_replaced(server: RunningServer) -> None:
    core = core_of(server)
    fields = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with patient.stream("POST", f"{server.url}/v1/completions", json=fields) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(core, signal.SIGKILL)
        told = [line for line in lines if line.startswith("data: {") and '"error"' in line]
    assert len(told) == 1
    assert '"code":503' in told[0]
    health = patient.get(f"{server.url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    fields = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    answer = patient.post(f"{server.url}/v1/completions", json=fields)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert patient.get(f"{server.url}/health").status_code == 200
    assert server.metric("octavo:core_restarts_total") == 1
    assert core_of(server) != core
    assert server.stop() == 0


def test_a_core_that_keeps_dying_ends_the_server(smollm2_path: str) -> None:
    with running_server(smollm2_path, *FLAGS, "--max-core-restarts", "1") as server:
        server.wait_until_ready()
        os.kill(core_of(server), signal.SIGKILL)
        server.wait_for_line("(the engine core is back)")
        os.kill(core_of(server), signal.SIGKILL)
        assert server.process.wait(60) == 1
        cause = server.wait_for_line(r"octavo serve: (.*)")
    assert cause == "the engine core was killed by signal 9 (restarts in the last 300 s: 1)"


def test_sighup_reads_keys_and_tenants(smollm2_path: str, tmp_path: Path) -> None:
    path, tenants = tmp_path / "keys", tmp_path / "tenants.toml"
    path.write_text("ann:first\n")
    tenants.write_text("[tenants.ann]\nmax_tokens = 1\n")
    files = ("--api-key-file", str(path), "--tenants", str(tenants))
    with running_server(smollm2_path, *FLAGS, *files) as server:

        def status(key: str) -> int:
            return patient.get(f"{server.url}/version", headers={"x-api-key": key}).status_code

        assert (status("first"), status("second")) == (200, 401)
        path.write_text("ann:second\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("(1 API keys read)")
        assert (status("first"), status("second")) == (401, 200)

        def two_tokens() -> int:
            body = {"prompt": "x", "max_tokens": 2}
            return patient.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": "second"}).status_code

        server.wait_until_ready()
        assert two_tokens() == 400
        for content, told in (("max_tokens", "the tenants stay as they were"), ("[tenants.ann]", "1 tenants read")):
            assert two_tokens() == 400
            tenants.write_text(content)
            server.process.send_signal(signal.SIGHUP)
            server.wait_for_line(f"({told})")
        assert two_tokens() == 200
        assert "first" not in server.output


def test_the_api_key_from_the_environment(smollm2_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "k")
    with running_server(smollm2_path, *FLAGS) as server:
        assert patient.get(f"{server.url}/v1/models").status_code == 401
        assert patient.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200
