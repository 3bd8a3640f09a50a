"""Configuration of logs: their form, and what of requests they may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import check_choices, option, require


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a server writes to standard error. Of prompts and answers that is nothing, unless asked for."""

    log_format: Literal["text", "json"] = option("text", "lines for people, or JSON objects with the request's id")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least urgent lines that are written")
    enable_log_requests: bool = option(False, "log prompt and parameters of every request")
    enable_log_outputs: bool = option(False, "log the text of every answer")
    max_log_len: int | None = option(None, "most characters of a prompt or answer in the log (default: all)")
    disable_uvicorn_access_log: bool = option(False, "no line for every HTTP request")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        ("/health,/ping,/metrics",), "paths without such a line, by commas or repeated"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        length = self.max_log_len
        require(length is None or 0 <= length <= 2**31, "max_log_len", length, f"0..{2**31}")

    @property
    def quiet_paths(self) -> frozenset[str]:
        """Those of ``disable_access_log_for_endpoints``."""
        return frozenset(path for item in self.disable_access_log_for_endpoints for path in item.split(",") if path)
