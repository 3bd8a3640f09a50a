"""Every error octavo raises on purpose, as one tree.

OctavoError
├── ConfigError            a flag or argument is wrong; the process should not start
├── ModelError             the model cannot be used
│   ├── FormatError        a file is malformed (names file, key and offset)
│   ├── UnsupportedModel   well formed, but an architecture/type/feature octavo lacks
│   └── ModelNotFound      no such name, file, folder or hub id
├── ValidationError        one request is wrong (names parameter and value; HTTP 400)
├── RequestError           one request failed while running (HTTP 500 for that request alone)
│   └── DeadlyRequestError the engine core dies of it: not to be sent again
├── OverloadedError        too much is waiting; the request was not taken in (HTTP 429)
│   └── QueueTimeError     it was, and waited too long; nothing of it was done
├── DeadlineError          the request ran, and was not finished in its time (HTTP 504)
├── EngineDeadError        the engine core is gone (HTTP 503)
│   └── EngineRestartingError  for now: another one is being started
├── KernelError            a backend cannot run an op
└── InvariantError         octavo's own bookkeeping is wrong: a bug
"""

from __future__ import annotations

from typing import Literal

MAX_MESSAGE = 2000  # characters, of errors about models


class OctavoError(Exception):
    """Root of all deliberate errors; the message is fit to show to a person."""


class ConfigError(OctavoError):
    """A flag or constructor argument is out of range or contradicts another."""


class ModelError(OctavoError):
    """The model cannot be loaded. A message that quotes very much of a file is cut."""

    def __init__(self, message: str):
        super().__init__(message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "...")


class FormatError(ModelError):
    """A model file is malformed. ``path``, ``key`` and ``offset`` say where."""

    def __init__(self, path: object, reason: str, *, key: str | None = None, offset: int | None = None):
        where = f"{path}"
        if key is not None:
            where += f", key {key!r}"
        if offset is not None:
            where += f", offset {offset}"
        super().__init__(f"{where}: {reason}")
        self.path, self.key, self.offset, self.reason = path, key, offset, reason


class UnsupportedModel(ModelError):
    """The checkpoint is well formed but uses something octavo does not implement."""


class ModelNotFound(ModelError):
    """No catalogue name, file, folder or hub repository answers to this name."""


class ValidationError(OctavoError):
    """A request is invalid. ``parameter`` is the API field at fault, or None."""

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None):
        super().__init__(message)
        self.parameter, self.value = parameter, value


class RequestError(OctavoError):
    """One request failed while it ran; others are unaffected."""


class DeadlyRequestError(RequestError):
    """The engine core died each time that it computed this request."""


class OverloadedError(OctavoError):
    """A request was refused because too much waits; nothing of it was done.

    ``reason`` is the limit that it would have passed, ``retry_after`` the seconds until it may fit (None: unknown).
    """

    def __init__(self, message: str, *, reason: str, retry_after: float | None = None):
        super().__init__(message)
        self.reason, self.retry_after = reason, retry_after


class QueueTimeError(OverloadedError):
    """A request waited as long as it may, and nothing of it was done. ``reason``: the server's limit, or its own."""

    def __init__(self, message: str, reason: Literal["max_queue_time", "timeout"] = "max_queue_time"):
        super().__init__(message, reason=reason)


class DeadlineError(OctavoError):
    """A request was not finished within its time-out."""


class EngineDeadError(OctavoError):
    """The engine core process ended unexpectedly or cannot be reached."""


class EngineRestartingError(EngineDeadError):
    """The engine core died and another one is being started; the request may be sent again."""


class KernelError(OctavoError):
    """A backend has no kernel for an op, shape or dtype."""


class InvariantError(OctavoError):
    """Octavo's own bookkeeping contradicts itself: a bug, never the user's fault."""
