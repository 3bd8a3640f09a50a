"""Configuration of the HTTP server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.config.engine import MAX_SECONDS, _require, option


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and whom it lets in."""

    host: str = option("127.0.0.1", "address to listen on (0.0.0.0: every interface)")
    port: int = option(8000, "port to listen on")
    api_key: str | None = option(
        None, "key that clients must send as 'Authorization: Bearer KEY'", env="OCTAVO_API_KEY"
    )
    shutdown_timeout: float = option(30.0, "seconds that running requests get after SIGTERM")
    enable_request_id_headers: bool = option(
        True, "answer with X-Request-Id: the client's own, or a fresh one (the log names it either way)"
    )
    enable_per_request_metrics: bool = option(
        False, "put a metrics object (times in ms) into every answer; a request may ask by return_metrics"
    )
    enable_force_include_usage: bool = option(
        False, "end every stream with a usage chunk, as if stream_options.include_usage were set"
    )

    request_timeout: float = option(60.0, "seconds in which a request's headers, then its body, must come (0: no end)")
    slow_client_timeout: float = option(
        60.0, "seconds after which a client that reads nothing of its answer is dropped (0: never)"
    )
    strict: bool = option(False, "refuse requests with unknown fields, instead of naming these in a header")

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "0..65535")
        for name in ("shutdown_timeout", "request_timeout", "slow_client_timeout"):
            _require(0 <= getattr(self, name) <= MAX_SECONDS, name, getattr(self, name), f"0..{MAX_SECONDS:g}")
        key = self.api_key
        # the key itself stays out of the message
        _require(key is None or bool(re.fullmatch("[!-~]+", key)), "api_key", "***", "printable ASCII, and not empty")
