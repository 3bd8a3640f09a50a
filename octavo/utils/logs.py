"""Log lines: text or JSON, one event a line, whatever it quotes.

Control characters are escaped and the lines of a traceback indented, so no client can forge a line.
``current_request_id`` is the ambient id that goes with each line; ``extra={"request_id": ...}`` goes before it, and
``extra={"fields": {...}}`` adds members to a JSON line.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
INDENT = "    "


def one_line(text: str) -> str:
    """``text`` with all that is not printable escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class TextFormatter(logging.Formatter):
    """``LEVEL logger: message [request id]``, then the indented lines of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {record.name}: {one_line(record.getMessage())}"
        if (request_id := _request_id(record)) is not None:
            line += f" [{one_line(request_id)}]"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line = "\n".join([line, *(INDENT + one_line(part) for part in trace)])
        return line


class JsonFormatter(logging.Formatter):
    """An object with time (UTC), level, logger, message; request_id, exception and the record's fields where it has."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname, "logger": record.name}
        line["message"] = record.getMessage()
        if (request_id := _request_id(record)) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def _request_id(record: logging.LogRecord) -> str | None:
    given: str | None = getattr(record, "request_id", None)
    return current_request_id.get() if given is None else given


def set_up(level: int | str, log_format: str) -> None:
    """Send all log lines of this process to standard error, and Python's own warnings and last words among them.

    ``log_format`` is text or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format]())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        logging.getLogger("octavo").critical("%s", error, exc_info=(kind, error, trace))


def is_json() -> bool:
    """Whether this process writes its log as JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def settings() -> tuple[int, str]:
    """(level, format) of this process, for those that it starts."""
    return logging.getLogger("octavo").getEffectiveLevel(), "json" if is_json() else "text"
