"""/v1/cache on a real server: prefixes are seen, pinned, evicted, saved and restored, by administrators only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running_server import SETTLE_SECONDS, RunningServer, running_server

FLAGS = "--served-model-name smollm2 --max-model-len 256 --kv-cache-memory 16MiB --api-key user --admin-api-key root"
SYSTEM = [500 + 3 * i for i in range(70)]  # four blocks of 16, and a part


class Client:
    def __init__(self, server: RunningServer) -> None:
        self.http = httpx.Client(base_url=server.url, headers={"x-api-key": "root"}, timeout=120)

    def call(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        response = self.http.request(method, f"/v1/cache{path}", **more)
        assert response.status_code == status, response.text
        return response.json()

    def refused(self, method: str, path: str, *words: str, param: str | None = None, **more: Any) -> None:
        error = self.call(method, path, 400, **more)["error"]
        assert error["param"] == param, error
        assert all(word in error["message"] for word in words), error

    def cached(self, prompt: list[int], **more: Any) -> int:
        """Run a request; its tokens that came from the cache."""
        answer = self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **more})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def metric(self, name: str) -> float:
        """The value, once it has been the same for a moment: the last step's stats may be on their way."""
        values = [-1.0, -2.0]
        while values[-1] != values[-2]:
            time.sleep(0.2)
            lines = self.http.get("/metrics").text.splitlines()
            values += [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
        return values[-1]

    def flood(self) -> None:
        """More new tokens than the pool holds."""
        start = 1000 + int(time.monotonic() * 1000) % 20000
        for i in range(4):
            assert self.cached([start + 250 * i + k for k in range(250)]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def cache_server(smollm2_path: str, folder: Path) -> Iterator[RunningServer]:
    with running_server(smollm2_path, *FLAGS.split(), "--kv-cache-dir", str(folder)) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(cache_server: RunningServer) -> Client:
    client = Client(cache_server)
    client.call("DELETE", "")
    return client


def test_for_administrators_only(client: Client) -> None:
    for method, path in [("GET", ""), ("POST", "/pins"), ("DELETE", "/pins/pin-0"), ("DELETE", "/prefixes")]:
        user = client.http.request(method, f"/v1/cache{path}", headers={"x-api-key": "user"}, json={"prefix_id": "00"})
        assert user.status_code == 403, (method, path)
    assert client.http.get("/v1/cache", headers={"x-api-key": "nobody"}).status_code == 401


def test_what_is_cached_is_listed(client: Client) -> None:
    assert client.call("GET", "")["prefixes"] == []
    client.cached(SYSTEM)
    client.cached([*SYSTEM[:48], *range(40, 60)])
    client.cached(SYSTEM, cache_salt="secret")
    before = time.time()
    listed = client.call("GET", "?preview=true")
    assert (listed["object"], listed["block_size"], listed["blocks_pinned_max"]) == ("cache", 16, 11)
    assert listed["prefixes_total"] == len(listed["prefixes"]) == 4
    assert listed["blocks_cached"] == 9
    by_size = {(one["tokens"], one["salted"]): one for one in listed["prefixes"]}
    system = by_size[48, False]
    assert (system["blocks"], system["blocks_in_use"], system["hits"], system["pins"]) == (3, 0, 1, [])
    assert abs(system["last_used"] - before) < 60
    assert system["preview"]
    assert by_size[64, True]["preview"] is None
    assert "secret" not in str(listed)
    assert "preview" not in client.call("GET", "?limit=1")["prefixes"][0]
    client.refused("GET", "?limit=0", "at least 1", param="limit")
    client.refused("GET", "?limit=many", 'must be an integer, got "many"', param="limit")
    client.refused("GET", "?preview=perhaps", "must be true or false", param="preview")


def test_a_pin_ends_while_nobody_asks_for_anything(client: Client) -> None:
    client.cached(SYSTEM)
    assert client.call("POST", "/pins", json={"prompt": SYSTEM, "ttl": 2})["blocks_held"] == 4
    deadline = time.monotonic() + SETTLE_SECONDS
    while client.metric("octavo:kv_cache_pinned_perc") + client.metric("vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline, "it is still held"


def test_a_pinned_prefix_stays(client: Client) -> None:
    client.cached(SYSTEM)
    assert client.metric("octavo:kv_cache_pinned_perc") == 0
    pin = client.call("POST", "/pins", json={"prompt": SYSTEM, "ttl": 600})
    assert (pin["tokens"], pin["blocks"], pin["blocks_held"], pin["tenant"]) == (64, 4, 4, None)
    assert 0 < pin["expires_at"] - time.time() <= 600
    client.flood()
    assert client.metric("octavo:kv_cache_pinned_perc") == client.metric("vllm:kv_cache_usage_perc") == 4 / 44
    assert client.cached(SYSTEM) == 64
    (listed,) = client.call("GET", "")["pins"]
    assert listed["id"] == pin["id"]
    marked = [one for one in client.call("GET", "")["prefixes"] if one["pins"]]
    assert [(one["id"], one["blocks_in_use"]) for one in marked] == [(pin["prefix_id"], 4)]
    assert client.call("DELETE", "/prefixes")["blocks"] > 0
    assert client.cached(SYSTEM) == 64, "eviction passes it by"
    assert client.call("DELETE", f"/pins/{pin['id']}")["deleted"] is True
    client.call("DELETE", f"/pins/{pin['id']}", 404)
    assert client.call("DELETE", f"/prefixes/{pin['prefix_id']}") == {"object": "cache.evicted", "blocks": 4}
    client.call("DELETE", f"/prefixes/{pin['prefix_id']}", 404)
    assert client.cached(SYSTEM) == 0


def test_pins_by_messages_and_by_id(client: Client) -> None:
    messages = [{"role": "system", "content": "You count the ships that pass. " * 8}]
    pin = client.call("POST", "/pins", json={"messages": messages})
    assert pin["blocks_held"] == 0
    chat = {"messages": [*messages, {"role": "user", "content": "How many?"}], "max_tokens": 1}
    assert client.http.post("/v1/chat/completions", json=chat).status_code == 200
    (listed,) = client.call("GET", "")["pins"]
    assert listed["blocks_held"] == listed["blocks"] >= 3
    again = client.call("POST", "/pins", json={"prefix_id": pin["prefix_id"], "ttl": 7200})
    assert again["id"] == pin["id"]
    assert again["expires_at"] > pin["expires_at"] + 3000


def test_what_cannot_be_pinned(client: Client) -> None:
    client.refused("POST", "/pins", "exactly one", param="prompt", json={})
    client.refused("POST", "/pins", "exactly one", param="prompt", json={"prompt": SYSTEM, "prefix_id": "00"})
    client.refused("POST", "/pins", "16, a block", param="prompt", json={"prompt": SYSTEM[:15]})
    client.refused("POST", "/pins", "15 blocks", "at most 11", json={"prompt": [9] * 240})
    client.refused("POST", "/pins", "more than 0", param="ttl", json={"prompt": SYSTEM, "ttl": 0})
    client.refused("POST", "/pins", "token ids", param="prompt", json={"prompt": [10**9]})
    client.call("POST", "/pins", 404, json={"prefix_id": "no hash"})
    client.call("POST", "/pins", 404, json={"prefix_id": "ab" * 32})
    assert client.call("GET", "")["pins"] == []


def test_a_saved_prefix_is_restored_by_the_next_server(smollm2_path: str, tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--kv-cache-dir", str(tmp_path)]
    with running_server(smollm2_path, *flags) as server:
        server.wait_until_ready()
        client = Client(server)
        client.cached(SYSTEM)
        assert client.call("POST", "/save", json={})["blocks"] == 4
        client.call("POST", "/save", 404, json={"prefix_id": "ab" * 32})
    with running_server(smollm2_path, *flags) as server:
        server.wait_until_ready()
        client = Client(server)
        assert client.call("GET", "")["prefixes"] == []
        assert client.call("POST", "/restore", json={"prompt": SYSTEM}) == {"object": "cache.restored", "blocks": 4}
        assert client.call("GET", "")["blocks_cached"] == 4
        client.call("POST", "/pins", json={"prompt": SYSTEM})
        assert client.cached(SYSTEM) == 64
