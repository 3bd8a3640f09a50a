"""KV events as a router hears them: the format on the wire, a set of blocks rebuilt from it, gaps and replay."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from octavo.config import KVEventsConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.kv_events import NullPublisher, make_publisher
from octavo.engine.llm_engine import LLMEngine
from octavo.exceptions import ConfigError
from octavo.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheOptions,
    EngineCoreRequest,
    KVEventBatch,
    ResetCache,
    SamplingParams,
)

from .tiny_llama import make_config

PROMPT = [5 * i % 300 for i in range(70)]
WAIT_MS = 60_000


class Subscriber:
    """Rebuilds the set of blocks, by (hash, group), from the stream alone."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(endpoint)
        self.blocks: set[tuple[int, int]] = set()
        self.numbers: list[int] = []
        self.raw: list[Any] = []

    def hear(self, *, at_least: int = 0, wait_ms: int = WAIT_MS) -> None:
        """Take in what comes, until at least so many batches have."""
        while len(self.raw) < at_least or self.socket.poll(0):
            assert self.socket.poll(wait_ms), f"only {len(self.raw)} batches came"
            _, number, batch = self.socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            self.raw.append(msgspec.msgpack.decode(batch))
            self.apply(msgspec.msgpack.decode(batch, type=KVEventBatch))

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    assert event.parent_block_hash is None or (event.parent_block_hash, event.group_idx) in self.blocks
                    self.blocks |= {(one, event.group_idx or 0) for one in event.block_hashes}
                case BlockRemoved():
                    gone = {(one, event.group_idx or 0) for one in event.block_hashes}
                    assert gone <= self.blocks
                    self.blocks -= gone
                case AllBlocksCleared():
                    self.blocks.clear()

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def addresses(tmp_path: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }


@pytest.fixture
def subscriber(addresses: dict[str, Any]) -> Iterator[Subscriber]:
    one = Subscriber(addresses["endpoint"], "kv")
    yield one
    one.close()


def request_of(name: str, prompt: list[int], salt: str | None = None) -> EngineCoreRequest:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        arrival_time=0.0,
        cache=CacheOptions(salt=salt),
    )


def run(engine: LLMEngine, *requests: EngineCoreRequest) -> None:
    engine._client.submit(requests)
    while engine._client.has_work():
        engine._client.step()


def known(engine: LLMEngine) -> set[tuple[int, int]]:
    """What the engine itself would find."""
    entries = engine._client._core._scheduler._kv.index.names.entries()
    return {(int.from_bytes(entry.row_hash[-8:]), entry.group) for entry in entries}


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_subscriber_knows_what_the_index_knows(
    tiny_model: str, addresses: dict[str, Any], subscriber: Subscriber, index: str
) -> None:
    config = make_config(tiny_model, kv_events_config={**addresses, "topic": "kv-events"}, prefix_index=index)
    whole = LLMEngine(config)
    size = whole.info.kv_cache_bytes // whole.info.num_blocks
    whole.shutdown()
    config = make_config(
        tiny_model,
        kv_events_config={**addresses, "topic": "kv-events"},
        prefix_index=index,
        kv_cache_memory=12 * size,
    )
    engine = LLMEngine(config)
    try:
        for number in itertools.count():  # until the subscription has arrived
            run(engine, request_of(f"first{number}", [number, *PROMPT[:20]]))
            if subscriber.socket.poll(100):
                break
        engine._client.ask(ResetCache())
        run(engine)
        for number in range(8):  # more than the pool holds
            run(engine, request_of(f"r{number}", [*PROMPT[: 3 * number], number, *PROMPT]))
            run(engine, request_of(f"s{number}", PROMPT, salt="secret" if number % 2 else None))
        deadline = time.monotonic() + 60
        while subscriber.blocks != known(engine) and time.monotonic() < deadline:
            subscriber.hear(at_least=len(subscriber.raw))
        assert subscriber.blocks == known(engine) != set()
        first = subscriber.numbers[0]
        assert subscriber.numbers == list(range(first, first + len(subscriber.numbers))), "none is missing"
    finally:
        engine.shutdown()
    kinds = [event["type"] for batch in subscriber.raw for event in batch[1]]
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} <= set(kinds)


def test_the_format_is_vllms(tiny_model: str, addresses: dict[str, Any]) -> None:
    """An array of time, events and rank; an event is a map, with these names and no others."""
    engine = LLMEngine(make_config(tiny_model, kv_events_config=addresses))
    before = time.time()
    run(engine, request_of("a", PROMPT, salt="s"))
    replayed = replay(addresses["replay_endpoint"], 0, 3)
    engine.shutdown()
    assert [number for number, _ in replayed] == [0, 1, -1]
    assert msgspec.msgpack.decode(replayed[0][1])[1] == [{"type": "AllBlocksCleared"}]
    ts, events, rank = msgspec.msgpack.decode(replayed[1][1])
    assert abs(ts - before) < 60
    assert rank == 0
    (event,) = events
    hashes = event.pop("block_hashes")
    assert len(set(hashes)) == 4
    assert all(0 <= one < 2**64 for one in hashes)
    assert event == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": PROMPT[:64],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["s"], None, None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def replay(endpoint: str, start: int, count: int) -> list[tuple[int, bytes]]:
    """The batches from ``start`` on, and the end, as (number, batch)."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    for junk in ([b"", b"short"], [b"one frame"]):
        socket.send_multipart(junk)
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    found = []
    while not found or found[-1][0] != -1:
        assert socket.poll(WAIT_MS)
        _, number, batch = socket.recv_multipart()
        found.append((int.from_bytes(number, "big", signed=True), batch))
    context.destroy(linger=0)
    assert len(found) == count
    return found


def test_what_strangers_send_is_bounded(addresses: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Their connection ends at a frame that is too long, which nobody reads; others are answered as before."""
    publisher = make_publisher(KVEventsConfig(**addresses))
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(addresses["replay_endpoint"])
        stranger.send_multipart([b"", bytes(1 << 20)])
        time.sleep(0.2)
        replay(addresses["replay_endpoint"], 0, 2)
    publisher.close()
    assert caplog.text.count("not an 8-byte number") == 2  # of replay()
    context.destroy(linger=0)


def test_whoever_is_slow_misses_some_and_asks_again(addresses: dict[str, Any]) -> None:
    publisher = make_publisher(KVEventsConfig(**addresses, hwm=1, buffer_steps=50))
    slow = Subscriber(addresses["endpoint"])
    while not slow.socket.poll(50):
        publisher.publish([BlockRemoved([1], "GPU", 0)])
    for number in range(20_000):
        publisher.publish([BlockRemoved([number], "GPU", 0)])
    publisher.publish([])
    deadline, hashes = time.monotonic() + 60, [0]
    while hashes[-1] != 19_999 and time.monotonic() < deadline:
        found = replay(addresses["replay_endpoint"], 0, 51)
        hashes = [msgspec.msgpack.decode(batch)[1][0]["block_hashes"][0] for _, batch in found[:-1]]
    assert hashes == list(range(19_950, 20_000)), "the last ones are kept"
    numbers = [number for number, _ in found[:-1]]
    assert numbers == list(range(numbers[0], numbers[0] + 50))
    while slow.socket.poll(200):
        slow.numbers.append(int.from_bytes(slow.socket.recv_multipart()[1], "big"))
    assert len(slow.numbers) < 20_000, "it held up nobody"
    slow.close()
    publisher.close()
    publisher.close()
    publisher.publish([AllBlocksCleared()])  # nobody is there any more, and nothing happens


async def test_the_core_process_publishes(tiny_model: str, addresses: dict[str, Any]) -> None:
    engine = await AsyncLLM.create(make_config(tiny_model, kv_events_config=addresses))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    async for _ in engine.generate(PROMPT, params):
        pass
    found = replay(addresses["replay_endpoint"], 1, 2)
    assert len(msgspec.msgpack.decode(found[0][1])[1][0]["block_hashes"]) == 4
    await engine.shutdown()


def test_off_by_default_and_wrong_settings_are_named(tiny_model: str, addresses: dict[str, Any]) -> None:
    assert isinstance(make_publisher(KVEventsConfig()), NullPublisher)
    assert isinstance(make_publisher(KVEventsConfig(**addresses, publisher="null")), NullPublisher)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"enable": True}, "unknown field 'enable'"),
        ({"enable_kv_cache_events": "yes"}, "must be bool"),
        ({"publisher": "kafka"}, "must be null or zmq"),
        ({"endpoint": "localhost:5557"}, "must begin with tcp://"),
        ({"hwm": 0}, "hwm = 0: must be 1"),
        ({"buffer_steps": True}, "must be int"),
    ]
    for values, words in wrong:
        with pytest.raises(ConfigError, match=f"kv_events_config: .*{words}"):
            make_config(tiny_model, kv_events_config=values)
    with pytest.raises(ConfigError, match=r"kv_events_config: endpoint = .*/nowhere/x"):
        make_publisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///nowhere/x"))
    with pytest.raises(ConfigError, match="left out without enable_prefix_caching"):
        make_config(tiny_model, kv_events_config=addresses, enable_prefix_caching=False)
