"""The HTTP connection with an end to its patience: for clients that send too slowly, and for those that do not read.

    connection or first byte ── headers complete ── body complete        each within ``request_timeout``
    a write that the client takes nothing of for ``slow_client_timeout``  ends the connection

uvicorn's own protocol waits for ever in all of these. A connection beyond ``max_connections`` is refused with 503. What
is no HTTP, or has too large headers, gets an error body too. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from http import HTTPStatus
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.entrypoints.http.context import Dialect

logger = logging.getLogger("octavo.server")
LINGER = 1.0  # seconds in which a client that is refused may go on sending, and then reads why
_uvicorns = logging.getLogger("octavo.http")  # its warnings tell less than our own line about the same
_uvicorns.setLevel(logging.ERROR)


def timed_protocol(
    dialect: Dialect, request_timeout: float, slow_client_timeout: float, max_connections: float = math.inf
) -> type[H11Protocol]:
    """The protocol class that refuses in ``dialect`` and has these limits, those of time in seconds; 0 s is none."""
    limits = {"request_timeout": request_timeout, "slow_client_timeout": slow_client_timeout}
    return type("TimedProtocol", (TimedProtocol,), {"dialect": dialect, "max_connections": max_connections, **limits})


class TimedProtocol(H11Protocol):
    """See the module. Limits are those of the class."""

    dialect: Dialect
    request_timeout = 0.0
    slow_client_timeout = 0.0
    max_connections = math.inf

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _uvicorns
        self._lingers = False
        self._awaited: Literal["headers", "body"] | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, f"the server has {self.max_connections} connections open, as many as it can")
            self.transport.close()  # at once: there is no room to wait
        else:
            self._await("headers")

    @property
    def _peer(self) -> str:
        return ":".join(map(str, self.client or ("a client",)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self._stop_writing()
        super().connection_lost(exc)

    # ---- what comes in

    def data_received(self, data: bytes) -> None:
        if not self._lingers:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._await("body")
        else:  # between two requests uvicorn's own timer runs
            self._await("headers" if state is h11.IDLE and self.conn.trailing_data[0] else None)

    def _await(self, what: Literal["headers", "body"] | None) -> None:
        if what == self._awaited:
            return
        self._awaited = what
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if what is not None and self.request_timeout:
            self._reading = self.loop.call_later(self.request_timeout, self._give_up)

    def _give_up(self) -> None:
        """Answer 408, if no answer has begun, and close the connection."""
        if self.flow.read_paused:  # it is the route that has not read on
            self._reading = self.loop.call_later(self.request_timeout, self._give_up)
            return
        self._refuse(408, f"the request's {self._awaited} did not arrive within {self.request_timeout:g} s")

    def send_400_response(self, msg: str) -> None:
        """uvicorn's hook, called while it handles what h11 says of bytes that are no request."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        msg = f"this is no valid HTTP request: {str(error)[:200]}"
        if status == 431:
            msg = f"the request's headers are larger than {self.config.h11_max_incomplete_event_size} bytes"
        self._refuse(status, msg)

    def _refuse(self, status: int, message: str) -> None:
        logger.info("%s: %d, %s", self._peer, status, message)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            self.transport.close()
            return
        headers = [("content-type", "application/json"), ("connection", "close")]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
        for event in (head, h11.Data(data=self.dialect.error_body(status, message, None, None)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self._linger()
        else:  # TLS
            self.transport.close()

    def _linger(self) -> None:
        """Drop what the client still sends for a while: closed at once, the connection would be reset, and the client
        might never read why.
        """
        self._lingers = True
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)

    # ---- what goes out

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if left := self.transport.get_write_buffer_size():
            self._expect_reader(left)

    def _expect_reader(self, size: int) -> None:
        """Look again whether the client has taken anything of the ``size`` bytes that wait for it."""
        self._stop_writing()
        if self.slow_client_timeout:
            self._writing = self.loop.call_later(self.slow_client_timeout, self._check_reader, size)

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _check_reader(self, before: int) -> None:
        size = self.transport.get_write_buffer_size()
        if 0 < size < before:
            self._expect_reader(size)
        elif size:
            logger.warning("%s has read nothing for %g s: closed", self._peer, self.slow_client_timeout)
            self.transport.abort()
