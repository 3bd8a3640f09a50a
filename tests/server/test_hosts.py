"""By which names a server may be called: a page whose own name points at this machine is kept out."""

from __future__ import annotations

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.exceptions import ConfigError
from tests.server.fake_engine import FakeEngine
from tests.server.running_server import running_server

ADDRESSES = ("127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5", "[fe80::1]")
LOCAL = ("localhost", "LOCALHOST:8000", "localhost.", "app.localhost")
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "xlocalhost",
    "[x",
)
PUBLIC = ("llm.example", "LLM.example:443")
BELOW = ("a.lab.example", "b.a.lab.example:80")


async def status(host: str, config: ServerConfig, *, only_local: bool = True, path: str = "/version") -> int:
    state = ServerState([ServedModel("m", engine=FakeEngine())], config=config, only_local=only_local)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        answer = await client.get(path, headers={"host": host, "x-api-key": "k"})
        if answer.status_code == 421:
            message = answer.json()["error"]["message"]
            assert "--allowed-hosts" in message
            assert host.partition(":")[0].strip("[.").lower() in message
        return answer.status_code


@pytest.mark.parametrize(
    ("config", "only_local", "let_in", "kept_out"),
    [
        (ServerConfig(), True, LOCAL, FOREIGN + PUBLIC),
        (ServerConfig(), False, LOCAL + FOREIGN, ()),
        (ServerConfig(api_key=("k",)), True, LOCAL + FOREIGN, ()),
        (ServerConfig(allowed_hosts=("*",)), True, LOCAL + FOREIGN, ()),
        (ServerConfig(allowed_hosts=("LLM.example", "*.lab.example")), False, PUBLIC + BELOW, LOCAL + FOREIGN),
        (ServerConfig(allowed_hosts=("llm.example",), api_key=("k",)), False, PUBLIC, FOREIGN + BELOW),
    ],
)
async def test_who_is_let_in(
    config: ServerConfig, only_local: bool, let_in: tuple[str, ...], kept_out: tuple[str, ...]
) -> None:
    for host in (*let_in, *ADDRESSES):
        assert await status(host, config, only_local=only_local) == 200, host
    for host in kept_out:
        for path in ("/version", "/health", "/v1/messages", "/nowhere"):
            assert await status(host, config, only_local=only_local, path=path) == 421, host


@pytest.mark.parametrize("host", ["", "llm.example:8000", "http://llm.example", "a..b", "*.", "a.*", "ä.example"])
def test_names_that_are_none(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(host,))


def test_a_server_on_loopback_guards_itself(smollm2_path: str) -> None:
    with running_server(smollm2_path, "--max-model-len", "64", "--kv-cache-memory", "16MiB") as server:
        server.wait_until_ready()
        assert httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"}).status_code == 421
        assert httpx.get(f"{server.url}/v1/models", headers={"host": "localhost"}).status_code == 200
