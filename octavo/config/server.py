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
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; may be repeated. Other users "
        "of this machine see flags: better use the variable or --api-key-file",
        env="OCTAVO_API_KEY",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "file with more keys: 'key' or 'name:key' a line; read again when it changes, and on SIGHUP"
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "key for all that others' keys may do and for the administrator's routes; may be repeated",
        env="OCTAVO_ADMIN_API_KEY",
        secret=True,
    )
    public_metrics: bool = option(False, "answer /metrics without a key too")
    enable_docs_page: bool = option(
        False, "serve /docs and /redoc, pages that show /openapi.json by scripts from a public CDN"
    )
    disable_fastapi_docs: bool = option(False, "do not serve /openapi.json either")
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
    max_body_bytes: int = option(10 << 20, "largest body of a request", size=True)
    h11_max_incomplete_event_size: int = option(64 << 10, "most bytes of a request's headers", size=True)
    h11_max_header_count: int = option(256, "most header fields of a request")
    strict: bool = option(False, "refuse requests with unknown fields, instead of naming these in a header")

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "0..65535")
        for name in ("shutdown_timeout", "request_timeout", "slow_client_timeout"):
            _require(0 <= getattr(self, name) <= MAX_SECONDS, name, getattr(self, name), f"0..{MAX_SECONDS:g}")
        size = self.max_body_bytes
        _require(1024 <= size <= 1 << 30, "max_body_bytes", size, "1 KiB to 1 GiB")
        size = self.h11_max_incomplete_event_size
        _require(1024 <= size <= 16 << 20, "h11_max_incomplete_event_size", size, "1 KiB to 16 MiB")
        _require(1 <= self.h11_max_header_count <= 65536, "h11_max_header_count", self.h11_max_header_count, "1..65536")
        for name in ("api_key", "admin_api_key"):  # the keys themselves stay out of the message
            keys = getattr(self, name)
            valid = isinstance(keys, tuple) and all(re.fullmatch("[!-~]{1,1024}", key) for key in keys)
            _require(valid, name, "***", "1 to 1024 printable ASCII characters without spaces")
        shared = set(self.api_key) & set(self.admin_api_key)
        _require(not shared, "admin_api_key", "***", "another key than every api_key")
        pages = self.enable_docs_page and self.disable_fastapi_docs
        _require(not pages, "enable_docs_page", True, "left out with disable_fastapi_docs")
