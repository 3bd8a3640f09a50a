"""The engine core in a process of its own: commands in, messages out, over ZeroMQ.

Started by ``core_client`` with :class:`Launch` on standard input, which stays open: when it closes, the front end is
gone and this process ends, also in the middle of a step. SIGINT and SIGTERM are ignored, for the front end decides when
running requests have been given their time. Knows nothing of text or HTTP.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from functools import reduce
from operator import or_
from typing import BinaryIO

import msgspec
import zmq

from octavo.core.queries import HANDLERS
from octavo.engine.core import EngineCore, PhaseClock
from octavo.engine.wire import (
    LENGTH_BYTES,
    Command,
    CoreFailure,
    CoreMessage,
    Launch,
    NumberedQuery,
    NumberedReply,
    PackedRequest,
)
from octavo.exceptions import OctavoError
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Reply,
    RequestFault,
    SchedulerStats,
)
from octavo.messages.fault import one_line
from octavo.utils.logs import set_up

logger = logging.getLogger(__name__)

IDLE_CHECK_MS = 1000  # idle for so long, the core checks its invariants; then a command or the end of a pin wakes it
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LINGER_MS = 1000  # how long the last messages may take to leave


def read_launch(stream: BinaryIO) -> Launch:
    """The launch order; blocks until it is complete. Raises EOFError if the front end goes away before that."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (part := stream.read(size - len(data))):
                raise EOFError("no launch order on standard input")
            data += part
        return data

    return msgspec.msgpack.decode(read(int.from_bytes(read(LENGTH_BYTES), "little")), type=Launch)


def exit_with_parent(stream: BinaryIO, folder: str) -> None:
    """End this process at once when ``stream`` closes, and remove ``folder``.

    A process that a signal has stopped could not do that: where the system can, it wakes this one first.
    """
    with contextlib.suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)

    def watch() -> None:
        while stream.read(1):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class CoreProcess:
    """Sockets around an EngineCore."""

    def __init__(self, launch: Launch):
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._request_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._query_decoder = msgspec.msgpack.Decoder(reduce(or_, HANDLERS))  # of the union of all queries
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._commands = context.socket(zmq.PULL)
        self._messages = context.socket(zmq.PUSH)
        for socket in (self._commands, self._messages):
            socket.set_hwm(0)  # memory is bounded by the requests themselves; never drop or block
            socket.linger = LINGER_MS
        self._commands.bind(launch.commands_address)
        self._messages.connect(launch.messages_address)

    def send(self, message: CoreMessage) -> None:
        self._messages.send(self._encoder.encode(message))

    def close(self) -> None:
        self._commands.close()
        self._messages.close()
        zmq.Context.instance().term()

    def run(self, core: EngineCore) -> None:
        """Serve until told to shut down. While busy it never blocks on the socket, while idle only there."""
        while self._apply_commands(core):
            if core.has_work():
                self._step(core)

    def _step(self, core: EngineCore) -> None:
        outputs = core.step()
        try:
            self.send(CoreMessage(outputs=outputs))
        except Exception as error:  # some output of it cannot be packed; nothing has been sent
            self.send(CoreMessage(outputs=self._without_unsendable(core, outputs, error)))

    def _without_unsendable(self, core: EngineCore, outputs: EngineCoreOutputs, error: Exception) -> EngineCoreOutputs:
        """``outputs`` with an error in place of each that no message can carry; its request ends in the core too."""
        fault, sound = RequestFault.of(error, "sending its output"), []
        for output in outputs.outputs:
            try:
                self._encoder.encode(output)
            except Exception:
                core.abort([output.request_id])
                reason = FinishReason.ERROR
                output = EngineCoreOutput(request_id=output.request_id, finish_reason=reason, error=fault)
            sound.append(output)
        return msgspec.structs.replace(outputs, outputs=sound)

    def _apply_commands(self, core: EngineCore) -> bool:
        """Apply all commands that have arrived, waiting for one if there is no work. False: shut down."""
        if not core.has_work() and not self._commands.poll(IDLE_CHECK_MS):
            core.check_invariants()
            seconds = core.seconds_to_expiry
            if not self._commands.poll(None if seconds is None else int(1000 * seconds) + 1):
                core.expire_pins()
        while True:
            try:
                command = self._decoder.decode(self._commands.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if command.shutdown:
                return False
            for request in command.requests:
                self._add(core, request)
            if command.abort_ids:
                core.abort(command.abort_ids)
            for one in command.queries:
                self.send(CoreMessage(reply=NumberedReply(one.number, self._reply(core, one))))

    def _add(self, core: EngineCore, request: PackedRequest) -> None:
        try:
            unpacked = self._request_decoder.decode(request.packed)
        except Exception as error:
            core.refuse(request.request_ids, RequestFault.of(error, "reading it"))
        else:
            core.add_request(unpacked)

    def _reply(self, core: EngineCore, query: NumberedQuery) -> Reply:
        try:
            unpacked = self._query_decoder.decode(query.packed)
        except Exception as error:
            return Reply(fault=RequestFault(f"the engine core cannot read this query: {one_line(error)}"))
        return core.ask(unpacked)


def load_core(launch: Launch, process: CoreProcess, started: float) -> EngineCore:
    """Load the model, telling the front end of each phase."""
    phases = PhaseClock(on_phase=lambda name: process.send(CoreMessage(phase=name)))
    from octavo.engine.core_builder import build_core
    from octavo.platforms.registry import make_platform

    phases.phases.append(("start core process", time.monotonic() - started))

    def tell(stats: SchedulerStats) -> None:
        process.send(CoreMessage(outputs=EngineCoreOutputs(outputs=[], timestamp=time.monotonic(), stats=stats)))

    memory = make_platform().resident_memory(os.getppid())
    return build_core(launch.config, phases=phases, on_scheduled=tell, front_end_bytes=memory)


def main(started: float | None = None) -> None:
    """Entry point of the process. Exit status 0 after an orderly shutdown, 1 after a failure that was reported."""
    started = started or time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stdin = os.fdopen(0, "rb", buffering=0, closefd=False)  # raw: no lock that the watching thread could die with
    launch = read_launch(stdin)
    exit_with_parent(stdin, launch.folder)
    set_up(launch.log_level, launch.log_format)
    process = CoreProcess(launch)
    core = None
    status = 0
    try:
        core = load_core(launch, process, started)
        gc.freeze()  # what is there now stays: no collection need look through it, while steps wait
        process.send(CoreMessage(ready=core.info))
        process.run(core)
    except Exception as error:
        if not isinstance(error, OctavoError):  # those explain themselves, and the front end shows them
            logger.error("engine core failed", exc_info=error)
        process.send(CoreMessage(failure=CoreFailure(kind=type(error).__name__, message=str(error) or repr(error))))
        status = 1
    if core is not None:
        core.shutdown()
    process.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
