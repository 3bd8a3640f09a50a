"""A streaming HTTP client that takes little from the server it shares the machine with.

While requests run it only notes when bytes came: taking chunks and JSON apart waits until the run is over. That, and a
bare ``asyncio.Protocol`` in place of a client library, is why it exists: a streamed token costs it a small part of the
processor time that it costs httpx (docs/guides/benchmarking.md). One connection a request, HTTP/1.1, no redirects.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.figures import RequestRecord
from octavo.exceptions import ConfigError

_LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Capture:
    """The raw answer to one request: the pieces as they came off the socket, and when."""

    sent: float
    prompt_tokens: int
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None  # why the exchange itself failed


class _Exchange(asyncio.Protocol):
    """Writes one request, keeps what comes back, and is done when the server closes or ends its chunks."""

    def __init__(self, request: bytes, capture: Capture) -> None:
        self.request, self.capture = request, capture
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.capture.pieces.append((time.perf_counter(), data))
        if data == _LAST_CHUNK or data.endswith(b"\r\n" + _LAST_CHUNK):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.capture.failure = f"connection lost: {exc}"
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Client:
    """An OpenAI-compatible server at ``base_url`` (``http://host:port``; a final ``/v1`` is ignored).

    Raises ConfigError for an address that is none.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url must look like http://127.0.0.1:8000, got {base_url!r}")
        self.host, self.timeout = parts.hostname, timeout
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\nAccept: */*\r\nConnection: close\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    def encode(self, method: str, path: str, body: Any = None) -> bytes:
        """The request as bytes, ready to be sent."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body is None:
            return f"{head}\r\n".encode()
        content = json.dumps(body).encode()
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content

    async def exchange(self, request: bytes, prompt_tokens: int = 0) -> Capture:
        """Send an encoded request and collect the answer. A failure is noted in the Capture, never raised."""
        capture = Capture(time.perf_counter(), prompt_tokens)
        protocol = _Exchange(request, capture)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout):
                await loop.create_connection(lambda: protocol, self.host, self.port, ssl=self._ssl)
                await protocol.done
        except TimeoutError:
            capture.failure = f"no complete answer within {self.timeout:g} s"
        except OSError as error:
            capture.failure = str(error)
        finally:
            protocol.close()
        return capture

    async def get_json(self, path: str) -> tuple[int | None, Any]:
        """(status, body) of a GET; (None, None) while nothing answers. A body that is not JSON is None."""
        capture = await self.exchange(self.encode("GET", path))
        try:
            status, pieces = body_pieces(capture.pieces)
        except ValueError:
            return None, None
        try:
            return status, json.loads(b"".join(data for _, data in pieces))
        except ValueError:
            return status, None


def body_pieces(pieces: list[tuple[float, bytes]]) -> tuple[int, list[tuple[float, bytes]]]:
    """(status, the body's pieces with their arrival times), chunked framing taken off.

    Raises ValueError if this is no HTTP answer, or one that ends before it is complete.
    """
    head, chunked, rest = b"", False, list(pieces)
    while b"\r\n\r\n" not in head:
        if not rest:
            raise ValueError("the server closed the connection before an answer")
        when, data = rest.pop(0)
        head += data
    head, _, body = head.partition(b"\r\n\r\n")
    status_line, *header_lines = head.split(b"\r\n")
    fields = status_line.split(None, 2)
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/") or not fields[1].isdigit():
        raise ValueError(f"not an HTTP answer: {status_line[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(b":") for h in header_lines)}
    chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
    rest = [(when, body), *rest]
    if chunked:
        return int(fields[1]), list(_dechunk(rest))
    length = headers.get(b"content-length")
    if length is not None and sum(len(data) for _, data in rest) < int(length):
        raise ValueError("the connection ended in the middle of an answer")
    return int(fields[1]), rest


def _dechunk(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The payload of chunked pieces; what arrived in one piece keeps its time."""
    buffer, wanted, ended = b"", 0, False  # wanted: bytes of the open chunk, its final CRLF included, yet to come
    for when, data in pieces:
        buffer += data
        while buffer and not ended:
            if wanted == 0:
                line, newline, after = buffer.partition(b"\r\n")
                if not newline:
                    break
                size = int(line.split(b";")[0], 16)
                ended, wanted, buffer = size == 0, size + 2, after
                continue
            taken = buffer[:wanted]
            buffer, wanted = buffer[len(taken) :], wanted - len(taken)
            payload = taken[: len(taken) - max(0, 2 - wanted)]
            if payload:
                yield when, payload
    if not ended:
        raise ValueError("the connection ended in the middle of an answer")


def read_answer(capture: Capture) -> RequestRecord:
    """The record of a streamed completion or chat answer. Whatever is wrong with it becomes ``error``."""
    record = RequestRecord(capture.sent, capture.prompt_tokens, error=capture.failure)
    if record.error is not None:
        return record
    try:
        status, pieces = body_pieces(capture.pieces)
        if status != 200:
            body = b"".join(data for _, data in pieces)
            raise ValueError(f"HTTP {status}: {body[:300].decode(errors='replace')}")
        _read_events(pieces, record)
    except (ValueError, KeyError, TypeError) as error:
        record.error = str(error) or repr(error)
    return record


def _read_events(pieces: list[tuple[float, bytes]], record: RequestRecord) -> None:
    """Fill in arrivals and usage. Raises ValueError for an error event and for an answer without a token."""
    usage, counted, ended, buffer = None, 0, False, b""
    for when, data in pieces:
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                ended = True
                continue
            chunk = json.loads(event)
            if chunk.get("error"):
                raise ValueError(f"error event: {str(chunk['error'])[:300]}")
            usage = chunk.get("usage") or usage
            running = (chunk.get("usage") or {}).get("completion_tokens")
            if chunk.get("choices"):
                new = running - counted if running is not None else int(_has_text(chunk["choices"][0]))
                record.arrivals += [when] * new
                counted += new
    if not ended:
        raise ValueError("the stream ended without [DONE]")
    if not record.arrivals:
        raise ValueError("the answer has no token")
    record.output_tokens = counted
    if usage is not None:
        record.output_tokens = usage.get("completion_tokens") or counted
        record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
