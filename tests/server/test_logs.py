"""What a server's log says of requests: a line each, nothing of their bodies unless asked for, and no forged lines."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.config import LogConfig, ServerConfig
from octavo.engine.live_request import LiveRequest
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.exceptions import ConfigError
from octavo.messages import EngineCoreRequest, RequestFault, SamplingParams
from octavo.utils.logs import FORMATTERS, JsonFormatter, TextFormatter, current_request_id, one_line
from tests import patient
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.running_server import ROOT, running_server

SECRET = "my secret prompt"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
TEXT: dict[str, Any] = {"prompt": SECRET, "max_tokens": 4}
WIDE = {"max_model_len": 256}


class Lines(logging.Handler):
    """What would be written, in both formats."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.json: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(TextFormatter().format(record))
        written = JsonFormatter().format(record)
        assert "\n" not in written
        self.json.append(json.loads(written))

    def fields(self, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(line.get(name) for name in names) for line in self.json]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("octavo")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def client_of(
    engine: FakeEngine, log: LogConfig | None = None, config: ServerConfig | None = None
) -> httpx.AsyncClient:
    state = ServerState(
        [ServedModel("m", engine=engine)], log_config=log or LogConfig(), config=config or ServerConfig()
    )  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(state)), base_url="http://octavo")


async def test_a_line_for_every_request_with_its_id(lines: Lines) -> None:
    async with client_of(FakeEngine(**WIDE), config=ServerConfig(api_key=("k",))) as client:
        headers = {"x-api-key": "k", "x-request-id": "one"}
        await client.post("/v1/completions?q=secret", json=TEXT, headers=headers)
        await client.post("/v1/completions", json={**TEXT, "temperature": SECRET}, headers=headers)
        await client.get("/v1/models", headers={"x-api-key": SECRET})
        await client.get("/nowhere", headers=headers)
        for quiet in ("/health", "/ping", "/metrics"):
            await client.get(quiet, headers=headers)
    assert lines.fields("method", "path", "status", "cause") == [
        ("POST", "/v1/completions", 200, None),
        ("POST", "/v1/completions", 400, "BadRequestError: temperature"),
        ("GET", "/v1/models", 401, "AuthenticationError"),
        ("GET", "/nowhere", 404, "NotFoundError"),
    ]
    assert [line["request_id"] for line in lines.json if line["status"] != 401] == ["one"] * 3
    assert {line["caller"][:4] for line in lines.json} == {"key-", ""}
    assert lines.text[0].startswith("INFO octavo.access: POST /v1/completions 200 ")
    assert lines.text[0].endswith(" [one]")
    assert "secret" not in "".join(lines.text)


async def test_the_line_is_for_some_paths_or_none(lines: Lines) -> None:
    for log, expected in (
        (LogConfig(disable_uvicorn_access_log=True), []),
        (LogConfig(disable_access_log_for_endpoints=("/version,/load",)), ["/health"]),
        (LogConfig(disable_access_log_for_endpoints=()), ["/version", "/health"]),
    ):
        lines.json.clear()
        async with client_of(FakeEngine(), log) as client:
            await client.get("/version")
            await client.get("/health")
        assert [line["path"] for line in lines.json] == expected


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abnormal_end_has_a_line_with_its_cause(lines: Lines, stream: bool) -> None:
    engine = FakeEngine(**WIDE)
    engine.fail_after = 1 if stream else 0
    async with client_of(engine) as client:
        await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    (line,) = lines.json
    assert (line["level"], line["status"]) == ("WARNING", 200 if stream else 500)
    assert line["cause"] == "InternalServerError: this one failed"


@pytest.mark.parametrize("fields", [{"stream": True}, {}])
async def test_a_client_that_leaves_is_seen(lines: Lines, fields: dict[str, Any]) -> None:
    engine = FakeEngine(delay=0.01, max_model_len=10_000)
    app = build_app(ServerState([ServedModel("m", engine=engine)]))  # type: ignore[arg-type]
    body = json.dumps({"prompt": "x", "max_tokens": 5000, **fields}).encode()
    inbox = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST"}
    scope |= {"path": "/v1/completions", "query_string": b"", "headers": [(b"content-type", b"application/json")]}
    task = asyncio.create_task(app(scope, receive, send))
    while engine.running == 0:
        await asyncio.sleep(0.001)
    gone.set()
    await asyncio.wait_for(task, 5)
    assert lines.fields("level", "cause") == [("INFO", "the client left")]


async def test_prompts_and_answers_are_logged_on_request_only(lines: Lines) -> None:
    quiet = LogConfig(disable_uvicorn_access_log=True)
    for log, prompt, answer in (
        (quiet, False, False),
        (LogConfig(disable_uvicorn_access_log=True, enable_log_requests=True), True, False),
        (LogConfig(disable_uvicorn_access_log=True, enable_log_outputs=True), False, True),
        (LogConfig(disable_uvicorn_access_log=True, enable_log_outputs=True, enable_log_requests=True), True, True),
    ):
        for path, body in (("/v1/completions", {**TEXT, "n": 2}), ("/v1/chat/completions", {**CHAT, "stream": True})):
            lines.text.clear()
            async with client_of(FakeEngine(**WIDE), log) as client:
                await client.post(path, json=body)
            written = "".join(lines.text)
            assert (SECRET in written, "'abcd'" in written) == (prompt, answer), (log, path)
            assert ("max_tokens=4" in written) == prompt
            assert written.count("ended (length)") == answer * body.get("n", 1)
    lines.text.clear()
    cut = LogConfig(enable_log_requests=True, enable_log_outputs=True, max_log_len=3)
    async with client_of(FakeEngine(**WIDE), cut) as client:
        await client.post("/v1/completions", json={**TEXT, "prompt": "secret", "echo": False})
    assert "'abc'" in "".join(lines.text)
    assert "secret" not in "".join(lines.text)


@pytest.mark.parametrize(
    "evil", ["a\nERROR octavo: forged", "a\r\nb", "\x1b[31mred", "a\u2028b", "\x85", "\ud800", "\0"]
)
async def test_no_line_can_be_forged(lines: Lines, evil: str) -> None:
    logger = logging.getLogger("octavo.test")
    logger.info("%s", evil, extra={"request_id": evil})
    try:
        raise ValueError(evil)
    except ValueError:
        logger.exception("failed")
    async with client_of(FakeEngine()) as client:
        path = httpx.URL("http://octavo").copy_with(
            raw_path=b"/" + evil.encode("utf-8", "surrogatepass").hex("%").encode()
        )
        await client.get(path)
    for text in lines.text:
        first, *rest = text.split("\n")
        assert first.isprintable()
        assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert len(lines.text) == 3


def test_a_line_of_a_fault_has_the_id_of_the_request(lines: Lines) -> None:
    token = current_request_id.set("a")
    wanted = SamplingParams(max_tokens=1, detokenize=False)
    request = EngineCoreRequest(request_id="r7", prompt_token_ids=[1], sampling_params=wanted, arrival_time=0.0)
    live = LiveRequest("cmpl-a-1", None, request, FakeTokenizer())  # type: ignore[arg-type]
    current_request_id.reset(token)
    message = live.tell(RequestFault("it failed", cause="ValueError: x\ny"))
    (line,) = lines.json
    assert line["request_id"] == "a"
    assert "request cmpl-a-1 (r7) failed: ValueError" in line["message"]
    assert line["message"].split()[1].rstrip(":") in message
    token = current_request_id.set("ambient")
    logging.getLogger("octavo.test").info("x")
    current_request_id.reset(token)
    assert [line["request_id"] for line in lines.json] == ["a", "ambient"]


def test_printable_text_is_left_alone() -> None:
    assert one_line("schön 漢字 😀 'x'") == "schön 漢字 😀 'x'"
    assert set(FORMATTERS) == {"text", "json"}


@pytest.mark.parametrize("fields", [{"log_format": "xml"}, {"log_level": "loud"}, {"max_log_len": -1}])
def test_what_cannot_be_configured(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        LogConfig(**fields)


def test_a_server_that_writes_json(smollm2_path: str) -> None:
    flags = ["--log-format", "json", "--max-model-len", "64", "--kv-cache-memory", "16MiB", "--max-num-seqs", "2"]
    with running_server(smollm2_path, *flags) as server:
        server.wait_until_ready()
        answer = patient.post(f"{server.url}/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        server.wait_for_line("(duration_ms)")
        server.stop()
        objects = [json.loads(line) for line in server.lines]
    (line,) = [one for one in objects if one.get("path") == "/v1/completions"]
    assert (line["request_id"], line["status"], line["level"]) == ("mine", 200, "INFO")
    assert all({"time", "level", "logger", "message"} <= one.keys() for one in objects)
    assert SECRET not in server.output
    (ready,) = [one["facts"] for one in objects if one["message"] == "octavo is ready"]
    assert ready["context"].startswith("64 tokens")
    assert any("octavo finishes" in one["message"] for one in objects)


@pytest.mark.parametrize(
    ("flags", "status", "word"), [(["--port", "-1"], 2, "port = -1"), (["--max-model-len", "64"], 1, "no-such-model")]
)
def test_a_start_that_fails_says_so_in_json(flags: list[str], status: int, word: str) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "/no-such-model.gguf", "--log-format", "json"]
    ended = subprocess.run([*command, "--port", "0", *flags], capture_output=True, text=True, cwd=ROOT, timeout=120)
    lines = [json.loads(line) for line in (ended.stdout + ended.stderr).splitlines()]
    assert ended.returncode == status
    (failure,) = [line["message"] for line in lines if line["level"] == "ERROR"]
    assert failure.startswith("octavo serve: ")
    assert word in failure


def test_a_reader_that_goes_ends_no_server(smollm2_path: str) -> None:
    """``octavo serve | head -1``: the screen, and the word that it ends, have nobody to read them."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", smollm2_path, "--port", "0", "--max-model-len", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        found = re.search(r"listens on (\S+), ", process.stdout.readline())
        process.stdout.close()
        assert found is not None
        deadline = time.monotonic() + 120
        while httpx.get(f"{found[1]}/health", timeout=60).status_code != 200:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Error" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


UNFORESEEN = """
import threading, warnings
from octavo.utils.logs import set_up
set_up("INFO", "json")
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("first\\nERROR octavo: forged")
"""


def test_pythons_own_words_are_lines_too() -> None:
    ended = subprocess.run([sys.executable, "-c", UNFORESEEN], capture_output=True, text=True, cwd=ROOT, timeout=60)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ["careful" in lines[0]["message"], *(line["message"] for line in lines[1:])] == [
        True,
        "division by zero",
        "first\nERROR octavo: forged",
    ]
    assert all("Traceback" in line["exception"] for line in lines[1:])
    assert ended.returncode == 1
