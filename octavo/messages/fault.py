"""Why one request failed: a sentence for its client, and a line for the log.

Knows no callers: ids and logging are the front end's (``engine.output_processor``).
"""

from __future__ import annotations

import traceback

import msgspec

from octavo.exceptions import RequestError, ValidationError

MAX_CAUSE = 1000  # characters


class RequestFault(msgspec.Struct, frozen=True, array_like=True):
    """``message`` may be shown to the client; ``cause`` is one line for the log alone, empty if it says no more.

    ``refused``: what the request asks for cannot be had, as only its running has shown; ``parameter`` is the field at
    fault, or None.
    """

    message: str
    cause: str = ""
    refused: bool = False
    parameter: str | None = None

    @classmethod
    def of(cls, error: BaseException, stage: str) -> RequestFault:
        """The fault of a request for which ``error`` was raised while ``stage``, e.g. "sampling".

        Errors raised on purpose explain themselves. Of any other one the client learns the stage, and the log the
        exception and where it was raised. Never raises.
        """
        if isinstance(error, ValidationError):
            return cls(one_line(error), refused=True, parameter=error.parameter)
        if isinstance(error, RequestError):
            return cls(one_line(error))
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = f" ({last[0].filename}:{last[0].lineno})" if last else ""
        return cls(f"internal error while {stage}", f"{stage}: {type(error).__name__}: {one_line(error)}{where}")

    def exception(self, message: str) -> RequestError | ValidationError:
        """The exception that the request's caller gets, in the words ``message``."""
        return ValidationError(message, parameter=self.parameter) if self.refused else RequestError(message)


def one_line(error: BaseException) -> str:
    """The error's message on one line, bounded, and free of lone surrogates, which no message could carry."""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be shown"
    return " ".join(text[:MAX_CAUSE].encode("utf-8", "replace").decode().split()) or type(error).__name__
