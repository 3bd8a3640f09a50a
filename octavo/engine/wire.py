"""What travels between the front end and the core process: one struct each way, as msgpack.

Both directions are a ZeroMQ PUSH/PULL pair on ``ipc://`` sockets in a folder that only this user can enter.
"""

from __future__ import annotations

import msgspec

from octavo.config import EngineConfig
from octavo.messages import EngineCoreOutputs, EngineInfo, Reply

LENGTH_BYTES = 8


def frame(payload: bytes) -> bytes:
    """``payload`` with its length in front: how :class:`Launch` goes down a pipe."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing the core process reads, from its standard input."""

    config: EngineConfig
    folder: str  # of the sockets; the process that ends last removes it
    log_level: int
    log_format: str

    @property
    def commands_address(self) -> str:
        """The core binds and pulls."""
        return f"ipc://{self.folder}/commands"

    @property
    def messages_address(self) -> str:
        """The core connects and pushes."""
        return f"ipc://{self.folder}/messages"


class PackedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request, packed and unpacked by itself: so that one that cannot be spoils no other."""

    request_ids: list[str]  # under which its outputs come
    packed: msgspec.Raw  # an EngineCoreRequest


class NumberedQuery(msgspec.Struct, frozen=True, array_like=True):
    """A query, packed by itself as a request is, and the number under which its reply comes."""

    number: int
    packed: msgspec.Raw  # a Query


class NumberedReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply to the query with this number."""

    number: int
    reply: Reply


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Front end to core. Requests are added before ids are aborted, queries are handled last."""

    requests: list[PackedRequest] = []
    abort_ids: list[str] = []
    queries: list[NumberedQuery] = []
    shutdown: bool = False


class CoreFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the core process ends. ``kind`` names a class of ``octavo.exceptions`` where it is one."""

    kind: str
    message: str


class CoreMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Core to front end; exactly one field is set. ``phase`` is the name of a start-up phase that begins."""

    outputs: EngineCoreOutputs | None = None
    reply: NumberedReply | None = None
    phase: str | None = None
    ready: EngineInfo | None = None
    failure: CoreFailure | None = None
