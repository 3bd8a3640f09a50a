"""How a front end holds an engine core: in its own process (LLM) or in another one (AsyncLLM).

Knows nothing of text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from octavo import exceptions
from octavo.config import EngineConfig
from octavo.engine.wire import Command, CoreFailure, CoreMessage, Launch, NumberedQuery, PackedRequest, frame
from octavo.exceptions import EngineDeadError, FormatError, ModelError, OctavoError
from octavo.messages import Answer, EngineCoreOutputs, EngineCoreRequest, EngineInfo, Query, Reply
from octavo.utils.logs import settings

LAST_WORDS_SECONDS = 0.2  # after an exit, how long to wait for the message that explains it
EXIT_SECONDS = 5.0  # an orderly shutdown may take this long before the process is killed
IPC_PATH_MAX = 80  # the kernel bounds the path of a socket to about 100 bytes

# The child sees the very modules its parent sees, wherever they were imported from.
BOOTSTRAP = (
    "import time; t = time.monotonic(); import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from octavo.engine.core_proc import main; main(t)"
)


class InprocClient:
    """The core as a plain object: :meth:`step` computes."""

    def __init__(self, config: EngineConfig, on_phase: Callable[[str], None] = lambda name: None):
        from octavo.engine.core import PhaseClock  # a server's front end needs nothing of it
        from octavo.engine.core_builder import build_core

        self._core = build_core(config, phases=PhaseClock(on_phase))
        self.info = self._core.info

    def submit(self, requests: Sequence[EngineCoreRequest] = (), abort_ids: Sequence[str] = ()) -> None:
        """Queue requests, then abort ids."""
        for request in requests:
            self._core.add_request(request)
        if abort_ids:
            self._core.abort(abort_ids)

    def ask(self, query: Query[Answer]) -> Answer:
        """Have the core handle ``query``. Raises ValidationError if that cannot be done."""
        return self._core.ask(query).result(query)

    def has_work(self) -> bool:
        return self._core.has_work()

    def step(self) -> EngineCoreOutputs:
        """Run one step. Raises EngineDeadError."""
        return self._core.step()

    def check_invariants(self) -> None:
        self._core.check_invariants()

    def shutdown(self) -> None:
        self._core.shutdown()


class AsyncCoreClient:
    """The core in a child process, from the side of one event loop.

    Requests and aborts of one turn of the loop travel as one message. The death of the process is noticed by waiting
    for it, not by asking. ``owes_since``: since when, in seconds of ``clock``, a core that has work has been silent.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the process, and return at once; :meth:`ready` waits for it. Needs a running event loop."""
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._requests: list[PackedRequest] = []
        self._abort_ids: list[str] = []
        self._queries: list[NumberedQuery] = []
        self._query_numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Reply]] = {}  # by the number of the query, until it is answered
        self._loaded = False
        self._closing = False
        self._exited = asyncio.Event()
        self._ending: asyncio.Future[None] | None = None
        self._receiving: asyncio.Future[bytes] | None = None
        self.error: EngineDeadError | None = None  # why the core is gone
        self.owes_since: float | None = None

        folder = tempfile.mkdtemp(prefix="octavo-")  # mode 0700
        if len(folder) > IPC_PATH_MAX:
            shutil.rmtree(folder)
            folder = tempfile.mkdtemp(prefix="octavo-", dir="/tmp")
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._messages: zmq.asyncio.Socket = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        for socket in (self._commands, self._messages):
            socket.set_hwm(0)
            socket.linger = 0
        level, log_format = settings()
        launch = Launch(config=config, folder=folder, log_level=level, log_format=log_format)
        order = frame(self._encoder.encode(launch))
        self._commands.connect(launch.commands_address)  # the connecting side queues until the other is there
        self._messages.bind(launch.messages_address)
        command = [sys.executable, "-c", BOOTSTRAP, json.dumps(sys.path)]
        environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}  # kernels have their own: NumPy starts faster without
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        threading.Thread(target=self._wait_for_exit, name="core-watch", daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: ready() says so
            self._process.stdin.write(order)
            self._process.stdin.flush()  # and stays open: its end is how the core knows of ours

    @property
    def pid(self) -> int:
        return self._process.pid

    # ---- death

    def _wait_for_exit(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it every waiter
            self._loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self._exited.set()
        if self._closing:
            return
        if code < 0:  # killed: it cannot have said why
            self._die(EngineDeadError(f"the engine core was killed by signal {-code}"))
        else:
            error = EngineDeadError(f"the engine core ended with status {code}")
            self._loop.call_later(LAST_WORDS_SECONDS, self._die, error)

    def kill(self, reason: str) -> None:
        """End the process at once, because of ``reason``, which :meth:`outputs` then raises."""
        self.error = self.error or EngineDeadError(reason)
        self._process.kill()

    def _die(self, error: EngineDeadError) -> None:
        self.error = self.error or error
        self._fail_queries()
        if self._receiving is not None:
            self._receiving.cancel()

    def _fail_queries(self) -> None:
        """The core will answer none any more."""
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(self.error or EngineDeadError("the engine core is gone"))

    # ---- messages

    async def ready(self, on_phase: Callable[[str], None] | None = None) -> EngineInfo:
        """Wait until the model is loaded. Raises the ModelError or ConfigError that ended it, or EngineDeadError."""
        while True:
            message = await self._receive()
            if message.phase is not None and on_phase is not None:
                on_phase(message.phase)
            if message.failure is not None:
                raise _as_exception(message.failure)
            if message.ready is not None:
                self._loaded = True
                return message.ready

    async def outputs(self) -> EngineCoreOutputs:
        """The next step's outputs. Raises EngineDeadError once the core is gone and all that it said has been read."""
        while True:
            message = await self._receive()
            if message.outputs is not None:
                stats = message.outputs.stats
                idle = stats is not None and stats.num_running == stats.num_waiting == 0
                self.owes_since = None if idle else self._clock()
                return message.outputs
            if message.reply is not None:
                reply = self._replies.pop(message.reply.number)
                if not reply.done():  # else its caller has left
                    reply.set_result(message.reply.reply)
            if message.failure is not None:
                self.error = EngineDeadError(f"the engine core failed: {message.failure.message}")
                raise self.error

    async def _receive(self) -> CoreMessage:
        while self.error is None:
            self._receiving = receiving = asyncio.ensure_future(self._messages.recv())
            try:
                return self._decode(await receiving)
            except asyncio.CancelledError:
                if self.error is None:
                    raise
            finally:
                self._receiving = None
        if not self._closing and await self._messages.poll(0):  # said before it died
            return self._decode(await self._messages.recv())
        raise self.error

    def _decode(self, data: bytes) -> CoreMessage:
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            self.kill(f"the engine core sent a message that cannot be read: {error}")
            assert self.error is not None
            raise self.error from error

    def submit(self, requests: Sequence[EngineCoreRequest] = (), abort_ids: Sequence[str] = ()) -> None:
        """Send requests and aborts, together with all others of this turn of the event loop. Never blocks.

        Raises what msgpack raises for a request that it cannot carry; nothing of this call is sent then.
        """
        packed = [PackedRequest(one.output_ids, msgspec.Raw(self._encoder.encode(one))) for one in requests]
        self._flush_soon()
        self.expect_answer()
        self._requests += packed
        self._abort_ids += abort_ids

    async def ask(self, query: Query[Answer]) -> Answer:
        """Have the core handle ``query`` between two steps. Raises ValidationError or EngineDeadError.

        Raises RequestError for a query that the core does not know, and what msgpack raises for one that it cannot
        carry; other queries are not concerned.
        """
        if self.error is not None:
            raise self.error
        packed = msgspec.Raw(self._encoder.encode(query))
        number = next(self._query_numbers)
        reply = self._replies[number] = self._loop.create_future()
        self._flush_soon()
        self._queries.append(NumberedQuery(number, packed))
        return (await reply).result(query)

    def expect_answer(self) -> None:
        """Note that the core has work, though its last message may have said otherwise."""
        if self.owes_since is None:
            self.owes_since = self._clock()

    def _flush_soon(self) -> None:
        if not (self._requests or self._abort_ids or self._queries):
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        command = Command(requests=self._requests, abort_ids=self._abort_ids, queries=self._queries)
        self._requests, self._abort_ids, self._queries = [], [], []
        if not self._closing:
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def shutdown(self) -> None:
        """End the process in order, or kill it after a while; free sockets and files. Idempotent."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)  # a caller that is cancelled does not leave it half done

    async def _end(self) -> None:
        self._closing = True
        self.error = self.error or EngineDeadError("the engine is shut down")
        self._fail_queries()
        if self._loaded:
            self._commands.send(self._encoder.encode(Command(shutdown=True)), zmq.NOBLOCK)
        else:
            self._process.kill()  # busy loading, it would not listen
        try:
            await asyncio.wait_for(self._exited.wait(), EXIT_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._exited.wait()
        if self._receiving is not None:
            self._receiving.cancel()
        self._messages.close()
        self._commands.close()
        self._context.term()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._remove_folder()


def _as_exception(failure: CoreFailure) -> OctavoError:
    """The start-up error as its own class, as far as a message alone can rebuild it."""
    kind = getattr(exceptions, failure.kind, None)
    if kind is FormatError:
        return ModelError(failure.message)
    if isinstance(kind, type) and issubclass(kind, OctavoError):
        return kind(failure.message)
    return EngineDeadError(f"the engine core failed to start: {failure.kind}: {failure.message}")
