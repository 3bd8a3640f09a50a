"""Server-sent events, and the end of work when the client has gone.

Knows nothing of chunks: it sends bytes that others encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.http.context import request_context
from octavo.entrypoints.http.errors import Failure, failure_of

T = TypeVar("T")

CLIENT_CLOSED = 499  # nginx's status for a client that left before the answer; it stays unread
_encoder = msgspec.json.Encoder()


def encode_event(payload: Any) -> bytes:
    """One event with ``payload`` as JSON."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def json_response(payload: Any, status: int = 200) -> Response:
    return Response(_encoder.encode(payload), status, media_type="application/json")


def encode_named_event(name: str, payload: Any) -> bytes:
    """One event of the kind ``name``, where a protocol names its events."""
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(payload) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None when the client left first; ``work`` is then cancelled and waited for."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Sends all that ``events`` yields; closes ``events`` when the client leaves.

    An exception becomes the event that ``on_error`` makes of it, and the stream still ends in order.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], on_error: Callable[[Failure], bytes]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_disconnect(receive, self._pump(scope, send))

    async def _pump(self, scope: Scope, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            failed = failure_of(error)
            request_context(scope).note_cause(failed.cause)
            await send({"type": "http.response.body", "body": self._on_error(failed), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond(
    request: Request,
    whole: Callable[[], Coroutine[Any, Any, object]],
    events: Callable[[], AsyncGenerator[bytes, None]],
    on_error: Callable[[Failure], bytes],
    *,
    stream: bool,
) -> Response:
    """The answer to ``request``: ``events`` as a stream, or the struct that ``whole`` comes to."""
    if stream:
        return EventStream(events(), on_error)
    answer = await until_disconnect(request.receive, whole())
    return json_response(answer) if answer is not None else Response(status_code=CLIENT_CLOSED)
