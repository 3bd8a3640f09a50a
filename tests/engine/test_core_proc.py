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
from octavo.engine.wire import Command, CoreMessage, Launch, PackedRequest, frame
from octavo.exceptions import InvariantError
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestFault,
    SamplingParams,
    SchedulingOptions,
)


def order(folder: Path) -> Launch:
    return Launch(config=EngineConfig(), folder=str(folder), log_level=30, log_format="text")


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
    """A core without work and pins, whose invariants do not hold."""

    seconds_to_expiry = None

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
    message = msgspec.msgpack.encode(core_proc.CoreMessage(outputs=outputs))
    assert msgspec.msgpack.decode(message, type=core_proc.CoreMessage).outputs == outputs


class ScriptedCore:
    """A core that remembers what it is told, and steps once with the outputs that it was given."""

    def __init__(self, outputs: list[EngineCoreOutput]) -> None:
        self.outputs = outputs
        self.added: list[EngineCoreRequest] = []
        self.refused: list[str] = []
        self.aborted: list[str] = []

    def has_work(self) -> bool:
        return bool(self.outputs)

    def step(self) -> EngineCoreOutputs:
        outputs, self.outputs = self.outputs, []
        return EngineCoreOutputs(outputs=outputs, timestamp=1.0)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.added.append(request)

    def refuse(self, output_ids: list[str], fault: RequestFault) -> None:
        self.refused += output_ids

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def check_invariants(self) -> None:
        pass


def run_once(process: CoreProcess, core: ScriptedCore, folder: Path, *commands: bytes) -> list[CoreMessage]:
    """Serve ``commands`` and the core's step; the messages that came of it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pushing, pulling = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    pushing.connect(order(folder).commands_address)
    pulling.bind(order(folder).messages_address)
    for command in (*commands, msgspec.msgpack.encode(Command(shutdown=True))):
        pushing.send(command)
    while core.has_work():
        process._step(core)  # type: ignore[arg-type]
    process.run(core)  # type: ignore[arg-type]
    messages = []
    while pulling.poll(200):
        messages.append(msgspec.msgpack.decode(pulling.recv(), type=CoreMessage))
    pushing.close()
    pulling.close()
    context.term()
    return messages


def test_an_output_that_no_message_can_carry_fails_alone(process: CoreProcess, tmp_path: Path) -> None:
    good = EngineCoreOutput(request_id="good", new_token_ids=[5])
    core = ScriptedCore([good, EngineCoreOutput(request_id="bad", stop_reason="\ud800")])
    (message,) = run_once(process, core, tmp_path)
    assert message.outputs is not None
    sent, failed = message.outputs.outputs
    assert sent == good
    assert (failed.request_id, failed.finish_reason) == ("bad", FinishReason.ERROR)
    assert core.aborted == ["bad"]


def test_a_request_that_cannot_be_read_fails_alone(process: CoreProcess, tmp_path: Path) -> None:
    request = EngineCoreRequest(
        request_id="good", prompt_token_ids=[1], sampling_params=SamplingParams(), arrival_time=0.0
    )
    wrong = msgspec.structs.replace(
        request, scheduling=SchedulingOptions(priority=True)
    )  # a bool is no int to the reader
    packed = [
        PackedRequest([f"{name}.0", f"{name}.1"], msgspec.Raw(msgspec.msgpack.encode(one)))
        for name, one in (("wrong", wrong), ("good", request))
    ]
    core = ScriptedCore([])
    run_once(process, core, tmp_path, msgspec.msgpack.encode(Command(requests=packed)))
    assert core.added == [request]
    assert core.refused == ["wrong.0", "wrong.1"]
