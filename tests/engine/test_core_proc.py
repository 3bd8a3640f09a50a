"""The core process's own parts: what it reads at the start, and what it does when nothing happens."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from octavo.config import EngineConfig
from octavo.engine import core_proc
from octavo.engine.core_proc import CoreProcess, read_launch
from octavo.engine.wire import Command, Launch, frame
from octavo.exceptions import InvariantError
from octavo.messages import EngineCoreOutputs


def order(folder: Path) -> Launch:
    return Launch(config=EngineConfig(), folder=str(folder), log_level=30)


class Trickle(io.RawIOBase):
    """A pipe that gives one byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(1)


def test_the_launch_order_may_come_in_pieces(tmp_path: Path) -> None:
    launch = order(tmp_path)
    data = frame(msgspec.msgpack.encode(launch))
    assert read_launch(Trickle(data)) == launch  # type: ignore[arg-type]
    with pytest.raises(EOFError):
        read_launch(Trickle(data[:-1]))  # type: ignore[arg-type]


class IdleCore:
    """A core without work, whose invariants do not hold."""

    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault
        self.checks = 0
        self.aborted: list[str] = []

    def has_work(self) -> bool:
        return False

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def check_invariants(self) -> None:
        self.checks += 1
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def process(tmp_path: Path) -> Any:
    one = CoreProcess(order(tmp_path))
    yield one
    one.close()


def test_invariants_are_checked_when_idle(process: CoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_proc, "IDLE_CHECK_MS", 1)
    with pytest.raises(InvariantError):
        process.run(IdleCore(InvariantError("a block is lost")))  # type: ignore[arg-type]


def test_idle_means_asleep(process: CoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One check, then nothing until a command comes; commands are obeyed in order, and the last one ends it."""
    monkeypatch.setattr(core_proc, "IDLE_CHECK_MS", 1)
    core = IdleCore(None)
    thread = threading.Thread(target=process.run, args=(core,))
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(order(tmp_path).commands_address)
    while core.checks == 0:
        thread.join(0.001)
    thread.join(0.05)
    assert core.checks == 1
    socket.send(msgspec.msgpack.encode(Command(abort_ids=["a", "b"])))
    socket.send(msgspec.msgpack.encode(Command(shutdown=True)))
    thread.join()
    assert core.aborted == ["a", "b"]
    socket.close()
    context.term()


def test_outputs_travel_unchanged() -> None:
    outputs = EngineCoreOutputs(timestamp=1.5)
    message = msgspec.msgpack.encode(core_proc.Message(outputs=outputs))
    assert msgspec.msgpack.decode(message, type=core_proc.Message).outputs == outputs
