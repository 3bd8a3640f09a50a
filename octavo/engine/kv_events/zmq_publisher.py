"""KV events on a ZeroMQ PUB socket, in vLLM's format, with a ROUTER socket that repeats the last ones.

    engine core ──PUSH/PULL (inproc)──▶ thread ──PUB──▶  [topic, sequence number, batch]          to each subscriber
                                          ▲ └───ROUTER──▶ [sequence number, batch] ..., [-1, ""]  to one who asked
                                          └──── ROUTER ── [number of the first batch wanted]

Numbers are 8 bytes, big-endian. Batches are numbered where they are made, so a batch that is dropped on the way (the
queue or a subscriber's is full) shows as a gap. The first batch says that all blocks are cleared: a subscriber that
knew an engine core before this one learns that its blocks are gone.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from octavo.config import KVEventsConfig
from octavo.exceptions import ConfigError
from octavo.messages import AllBlocksCleared, KVEvent, KVEventBatch

logger = logging.getLogger(__name__)

NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
LONGEST_REQUEST = 4096  # bytes of what strangers may send: a topic, or a number; else they could fill the memory
CLOSE_SECONDS = 1.0  # how long the last batches may take to leave
STOP: list[bytes] = [b""]  # to the thread


class ZmqPublisher:
    """See ``KVEventPublisher``."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = itertools.count()
        self._num_dropped = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._queue = self._context.socket(zmq.PUSH)
        self._queue.set_hwm(config.max_queue_size)
        self._queue.bind("inproc://queue")
        try:
            self._sender = _Sender(self._context, config)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._sender.run, name="kv-events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[KVEvent]) -> None:
        if not events or self._queue.closed:
            return
        batch = self._encoder.encode(KVEventBatch(time.time(), list(events), 0))
        try:
            self._queue.send_multipart([next(self._numbers).to_bytes(NUMBER_BYTES), batch], zmq.NOBLOCK)
        except zmq.Again:
            self._num_dropped += 1
            if self._num_dropped & (self._num_dropped - 1) == 0:  # 1, 2, 4, 8 ...
                logger.warning("KV events: %d batches dropped, for the queue was full", self._num_dropped)

    def close(self) -> None:
        if self._queue.closed:
            return
        try:
            self._queue.send_multipart(STOP, zmq.NOBLOCK)
            self._thread.join(CLOSE_SECONDS)
        except zmq.Again:
            logger.warning("KV events: the last batches are not sent")
        self._queue.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()


class _Sender:
    """What the thread does. Its sockets are made by the thread that starts it, which leaves them to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: KVEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._queue = context.socket(zmq.PULL)
        self._queue.set_hwm(1)
        self._queue.connect("inproc://queue")
        self._subscribers = context.socket(zmq.PUB)
        self._subscribers.maxmsgsize = LONGEST_REQUEST
        self._subscribers.set_hwm(config.hwm)
        self._subscribers.linger = int(1000 * CLOSE_SECONDS)
        bound = config.endpoint.startswith(("ipc://", "inproc://")) or "*" in config.endpoint or "::" in config.endpoint
        self._open(self._subscribers, "endpoint", config.endpoint, bind=bound)
        self._poller = zmq.Poller()
        self._poller.register(self._queue, zmq.POLLIN)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.maxmsgsize = LONGEST_REQUEST
        self._replay.set_hwm(config.buffer_steps + 1)
        self._replay.linger = 0
        if config.replay_endpoint is not None:
            self._open(self._replay, "replay_endpoint", config.replay_endpoint, bind=True)
            self._poller.register(self._replay, zmq.POLLIN)

    @staticmethod
    def _open(socket: zmq.Socket[bytes], name: str, endpoint: str, *, bind: bool) -> None:
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events_config: {name} = {endpoint!r}: {error}") from error

    def run(self) -> None:
        try:
            while self._step():
                pass
        except Exception:
            logger.exception("KV events have ended")
        for socket in (self._queue, self._subscribers, self._replay):
            socket.close()

    def _step(self) -> bool:
        """Pass on what has come; False at the end."""
        ready = dict(self._poller.poll())
        if self._replay in ready:
            self._repeat(self._replay.recv_multipart())
        if self._queue in ready:
            message = self._queue.recv_multipart()
            if message == STOP:
                return False
            number, batch = message
            self._subscribers.send_multipart([self._topic, number, batch])
            self._kept.append((number, batch))
        return True

    def _repeat(self, request: list[bytes]) -> None:
        """Send all kept batches from a number on, to who asked for them."""
        if len(request) != 3 or len(request[2]) != NUMBER_BYTES:
            logger.warning("KV events: a request for replay is not an 8-byte number")
            return
        client, _, first = request
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart([client, b"", number, batch])
        self._replay.send_multipart([client, b"", END_OF_REPLAY, b""])
