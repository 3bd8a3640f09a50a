"""Configuration of the HTTP server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from octavo.config.option import MAX_SECONDS, option, require


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and whom it lets in."""

    host: str = option("127.0.0.1", "address to listen on (0.0.0.0: every interface)")
    port: int = option(8000, "port to listen on")
    uds: str | None = option(None, "path of a Unix socket to listen on, instead of host and port")
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "addresses or networks of proxies, e.g. 127.0.0.1 or 10.0.0.0/8, whose X-Forwarded-For names clients for the "
        "log; may be repeated (default: none)",
    )
    root_path: str = option("", "path before every route, which a proxy may take away or leave, e.g. /llm")
    ssl_certfile: str | None = option(None, "PEM file with the certificate and its chain: serve HTTPS")
    ssl_keyfile: str | None = option(None, "PEM file with the certificate's key (default: in the certificate's file)")
    ssl_ca_certs: str | None = option(None, "PEM file with the authorities that clients' certificates must come from")
    ssl_cert_reqs: int = option(0, "clients' certificates: 0 are not asked for, 1 may be sent, 2 must be sent")
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins whose pages may call this server (CORS), e.g. https://a.example or *; may be repeated; default none",
    )
    allowed_methods: tuple[str, ...] = option(("*",), "methods that these pages may use")
    allowed_headers: tuple[str, ...] = option(("*",), "headers that these pages may send")
    allow_credentials: bool = option(False, "let these pages send cookies and certificates")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names besides addresses by which this server may be called, e.g. llm.example, *.example or * for any; may be "
        "repeated (default: localhost where nobody else can connect and no key is needed, otherwise any)",
    )
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
    tenant_header: str | None = option(
        None, "header that names a request's tenant, where a proxy always sets it (default: the name of its key)"
    )
    slow_client_timeout: float = option(
        60.0, "seconds after which a client that reads nothing of its answer is dropped (0: never)"
    )
    max_body_bytes: int = option(10 << 20, "largest body of a request", size=True)
    h11_max_incomplete_event_size: int = option(64 << 10, "most bytes of a request's headers", size=True)
    h11_max_header_count: int = option(256, "most header fields of a request")
    strict: bool = option(False, "refuse requests with unknown fields, instead of naming these in a header")

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, "0..65535")
        for name in ("shutdown_timeout", "request_timeout", "slow_client_timeout"):
            require(0 <= getattr(self, name) <= MAX_SECONDS, name, getattr(self, name), f"0..{MAX_SECONDS:g}")
        header = self.tenant_header
        require(header is None or bool(re.fullmatch("[A-Za-z0-9-]{1,64}", header)), "tenant_header", header, "a name")
        size = self.max_body_bytes
        require(1024 <= size <= 1 << 30, "max_body_bytes", size, "1 KiB to 1 GiB")
        size = self.h11_max_incomplete_event_size
        require(1024 <= size <= 16 << 20, "h11_max_incomplete_event_size", size, "1 KiB to 16 MiB")
        require(1 <= self.h11_max_header_count <= 65536, "h11_max_header_count", self.h11_max_header_count, "1..65536")
        for name in ("api_key", "admin_api_key"):  # the keys themselves stay out of the message
            keys = getattr(self, name)
            valid = isinstance(keys, tuple) and all(re.fullmatch("[!-~]{1,1024}", key) for key in keys)
            require(valid, name, "***", "1 to 1024 printable ASCII characters without spaces")
        shared = set(self.api_key) & set(self.admin_api_key)
        require(not shared, "admin_api_key", "***", "another key than every api_key")
        self._check_tls()
        path = self.root_path
        require(not path or bool(re.fullmatch(r"(/[\w.~-]+)+", path)), "root_path", path, "like /llm, or empty")
        for address in self.forwarded_allow_ips:
            require(_is_network(address), "forwarded_allow_ips", address, "addresses or networks")
        for host in self.allowed_hosts:
            known = bool(re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host))
            require(known, "allowed_hosts", host, "names without ports, like llm.example or *.example, or *")
        anybody = self.allow_credentials and "*" in self.allowed_origins
        require(
            not anybody, "allow_credentials", True, "left out where allowed_origins has *: any page would be let in"
        )
        pages = self.enable_docs_page and self.disable_fastapi_docs
        require(not pages, "enable_docs_page", True, "left out with disable_fastapi_docs")

    def _check_tls(self) -> None:
        require(self.ssl_cert_reqs in (0, 1, 2), "ssl_cert_reqs", self.ssl_cert_reqs, "0, 1 or 2")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            require(path is None or self.ssl_certfile is not None, name, path, "given with ssl_certfile")
        needs = self.ssl_cert_reqs == 0 or self.ssl_ca_certs is not None
        require(
            needs, "ssl_cert_reqs", self.ssl_cert_reqs, "0 without ssl_ca_certs, for no certificate could be checked"
        )


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
