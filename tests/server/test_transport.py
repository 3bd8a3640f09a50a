"""How the server is reached: TLS, Unix sockets, other origins, a path before the routes; and wrong flags."""

from __future__ import annotations

import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.cli import listen
from octavo.config import ServerConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.exceptions import ConfigError
from tests import patient
from tests.server.fake_engine import FakeEngine
from tests.server.running_server import ROOT, RunningServer, running_server

FLAGS = ("--served-model-name", "m", "--max-model-len", "64", "--kv-cache-memory", "16MiB")


def client_of(config: ServerConfig) -> httpx.AsyncClient:
    state = ServerState([ServedModel("m", engine=FakeEngine())], config=config)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(state)), base_url="http://octavo")


def certificate(folder: Path, name: str, *signer: str) -> tuple[str, str]:
    """(certificate, key) for 127.0.0.1, self-signed unless ``signer`` has openssl's flags for a CA."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", *signer]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def subject(url: str) -> str:
    host, port = url.removeprefix("https://").split(":")
    pem = ssl.get_server_certificate((host, int(port)))
    shown = subprocess.run(["openssl", "x509", "-noout", "-subject"], input=pem, capture_output=True, text=True)
    return shown.stdout


def test_https_and_a_renewed_certificate(smollm2_path: str, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "first")
    server = RunningServer(smollm2_path, *FLAGS, "--ssl-certfile", cert, "--ssl-keyfile", key)
    try:
        server.wait_for_line("(octavo is ready)")
        trusting = ssl.create_default_context(cafile=cert)
        with patient.Client(verify=trusting, base_url=server.url) as client:
            answer = client.get("/version")
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "server" not in answer.headers
        with pytest.raises(httpx.ConnectError):
            patient.get(f"{server.url}/version")
        with pytest.raises(httpx.RemoteProtocolError):
            patient.get(f"{server.url}/version".replace("https", "http"))
        assert "first" in subject(server.url)
        new_cert, new_key = certificate(tmp_path, "second")
        Path(cert).write_text("nothing")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("(certificate stays as it was)")
        assert "first" in subject(server.url)
        os.replace(new_key, key)
        os.replace(new_cert, cert)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("(certificate read from)")
        assert "second" in subject(server.url)
        assert server.stop() == 0
    finally:
        server.process.kill()
        server.process.wait()


def test_clients_may_have_to_show_a_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    mine, my_key = certificate(tmp_path, "client")
    config = ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=mine, ssl_cert_reqs=2)
    context = listen.tls_context(config)
    assert context is not None
    for shows in (True, False):
        side = ssl.create_default_context(cafile=cert)
        if shows:
            side.load_cert_chain(mine, my_key)
        assert handshake(context, side) is shows


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Whether both sides are content, over memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = [False, False]
    for _ in range(10):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done[number] = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    return all(done)


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\n", "key of another", "encrypted"])
def test_a_wrong_certificate_stops_the_start(tmp_path: Path, content: Any) -> None:
    cert, key = certificate(tmp_path, "one")
    if content == "key of another":
        key = certificate(tmp_path, "two")[1]
    elif content == "encrypted":
        locked = str(tmp_path / "locked.key")
        subprocess.run(["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", key, "-out", locked], check=True)
        key = locked
    else:
        cert = str(tmp_path / "cert.pem")
        if content is not None:
            Path(cert).write_bytes(content)
    with pytest.raises(ConfigError, match="ssl_certfile") as caught:
        listen.tls_context(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    assert cert in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile"),
        ({"ssl_ca_certs": "k"}, "ssl_ca_certs"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "ssl_cert_reqs"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"root_path": "/a b"}, "root_path"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "allow_credentials"),
        ({"enable_docs_page": True, "disable_fastapi_docs": True}, "enable_docs_page"),
        ({"max_body_bytes": 10}, "max_body_bytes"),
        ({"h11_max_header_count": 0}, "h11_max_header_count"),
        ({"forwarded_allow_ips": ("proxy",)}, "forwarded_allow_ips"),
        ({"forwarded_allow_ips": ("10.0.0.1/8",)}, "forwarded_allow_ips"),
    ],
)
def test_what_cannot_be_configured(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = "):
        ServerConfig(**fields)


def test_a_unix_socket(smollm2_path: str, tmp_path: Path) -> None:
    path = str(tmp_path / "octavo.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    with running_server(smollm2_path, *FLAGS, "--uds", path, "--root-path", "/llm") as server:
        assert server.url == f"unix:{path}:/llm"
        with patient.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://any") as client:
            assert client.get("/llm/version").status_code == 200
        second = subprocess.run(
            [sys.executable, "-m", "octavo.cli.main", "serve", smollm2_path, "--uds", path],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert (second.returncode, "another server runs there" in second.stderr) == (2, True)
        assert server.stop() == 0
    assert not os.path.exists(path)


def test_a_file_is_not_replaced_by_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="precious"):
        listen.bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "data"


async def test_other_origins_are_let_in_by_name_only() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with client_of(ServerConfig(api_key=("k",))) as client:
        for answer in (
            await client.options("/v1/models", headers=preflight),
            await client.get("/health", headers=preflight),
        ):
            assert not any(name.startswith("access-control") for name in answer.headers)
    config = ServerConfig(api_key=("k",), allowed_origins=("https://a.example",), allowed_methods=("GET", "POST"))
    async with client_of(config) as client:
        allowed = await client.options("/v1/models", headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert "access-control-allow-credentials" not in allowed.headers
        other = await client.options("/v1/models", headers={**preflight, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = await client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")


async def test_a_path_before_the_routes() -> None:
    config = ServerConfig(root_path="/v1", api_key=("k",), enable_docs_page=True)
    async with client_of(config) as client:
        for path in ("/health", "/v1/health", "/v1/v1/models", "/v1/openapi.json"):
            key = {} if path.endswith("health") else {"x-api-key": "k"}
            assert (await client.get(path, headers=key)).status_code == 200, path
        for path in ("/v1/v1/models", "/v1/metrics", "/v1/v1/health", "/v1health"):
            assert (await client.get(path)).status_code == 401, path
        document = (await client.get("/v1/openapi.json", headers={"x-api-key": "k"})).json()
        assert document["servers"] == [{"url": "/v1"}]


def test_a_port_that_is_taken_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*another --port"):
            listen.bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        listen.bind(ServerConfig(host="no.such.host.invalid"))


@pytest.mark.parametrize(("flags", "client"), [([], "127.0.0.1"), (["--forwarded-allow-ips", "127.0.0.1"], "9.9.9.9")])
def test_clients_names_are_taken_from_proxies_that_are_named(smollm2_path: str, flags: list[str], client: str) -> None:
    with running_server(smollm2_path, *FLAGS, *flags) as server:
        server.wait_until_ready()
        httpx.get(f"{server.url}/version", headers={"x-forwarded-for": "9.9.9.9"})
        assert server.wait_for_line(r"/version 200 \d+ ms ([\d.]+)") == client


def test_who_can_reach_it() -> None:
    for host, elsewhere in (("127.0.0.1", False), ("127.0.0.2", False), ("localhost", False), ("0.0.0.0", True)):
        config = ServerConfig(port=0, host=host)
        listener = listen.bind(config)
        assert listen.is_reachable_from_elsewhere(config, listener) is elsewhere
        assert listen.is_on_loopback(config, listener) is not elsewhere
        listen.close(config, listener)


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 20), (65536, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((1 << 17, 1 << 20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_server_may_have_many_connections(
    limits: tuple[int, int], raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    listen.allow_many_connections()
    assert asked == ([] if raised is None else [raised])


async def test_a_page_cannot_send_a_body_that_needs_no_preflight() -> None:
    """Without asking the server first, a browser sends these types, or none."""
    content = b'{"prompt": "x", "max_tokens": 1}'
    async with client_of(ServerConfig()) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            headers = {"content-type": kind} if kind else {}
            refused = await client.post("/v1/completions", content=content, headers=headers)
            assert refused.status_code == 400, kind
        headers = {"content-type": "application/json; charset=utf-8"}
        assert (await client.post("/v1/completions", content=content, headers=headers)).status_code == 200
