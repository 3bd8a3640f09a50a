"""The server's front door: its socket, its certificate, and the URL to print. Raises ConfigError for what cannot be."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import ssl
import stat

from octavo.config import ServerConfig
from octavo.exceptions import ConfigError

BACKLOG = 2048
MOST_FILES = 65536
ACCEPTS = 32  # connections that are taken from the queue at once
OTHER_FILES = 160  # that the process must be able to open: its core's sockets, also of the next core, and ACCEPTS


def allow_many_connections() -> None:
    """Let this process have as many files open, and so connections, as the system lets it: the usual 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """How many connections may be open: beyond that, a dead core could not be replaced for want of files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else max(soft - OTHER_FILES, soft // 2)


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket; connections queue in it until the application is there."""
    try:
        listener = _unix_socket(config.uds) if config.uds is not None else _tcp_socket(config)
        listener.listen(BACKLOG)
    except OSError as error:
        where = config.uds or f"{config.host} port {config.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}{_advice(config, error)}") from error
    return listener


def _advice(config: ServerConfig, error: OSError) -> str:
    if isinstance(error, PermissionError) and config.uds is None and config.port < 1024:
        return "; ports below 1024 are the system's, choose another --port"
    if error.errno == 98:
        return "; another server runs there, choose another --port, or 0 for any that is free"
    if isinstance(error, socket.gaierror):
        return "; --host takes an address or a name of this machine"
    return ""


def _tcp_socket(config: ServerConfig) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.slow_client_timeout and hasattr(socket, "TCP_USER_TIMEOUT"):
        # accepted sockets inherit it: the kernel too gives up a client that takes nothing, or is gone
        limit = min(int(1000 * config.slow_client_timeout), 2**31 - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    listener.bind(address)
    return listener


def _unix_socket(path: str) -> socket.socket:
    """Who may connect is the folder's and the umask's choice. What a killed server left there is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
            os.unlink(path)
    listener.bind(path)
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        return True


def close(config: ServerConfig, listener: socket.socket) -> None:
    """Close the socket and take its file away."""
    listener.close()
    if config.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(config.uds)


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """Where clients of this machine find the server."""
    if config.uds is not None:
        return f"unix:{config.uds}:{config.root_path}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}{config.root_path}"


def is_reachable_from_elsewhere(config: ServerConfig, listener: socket.socket) -> bool:
    """Whether other machines may connect."""
    return config.uds is None and not is_on_loopback(config, listener)


def is_on_loopback(config: ServerConfig, listener: socket.socket) -> bool:
    """Whether it listens on TCP, for this machine alone."""
    return config.uds is None and ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the configured certificate; None without one."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(config, context)
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"ssl_ca_certs = {config.ssl_ca_certs!r}: {error.strerror or error}") from error
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def load_certificate(config: ServerConfig, context: ssl.SSLContext) -> None:
    """(Re)read certificate and key; connections from now on use them."""
    assert config.ssl_certfile is not None
    try:
        # without a password an encrypted key would ask the terminal for one
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except OSError as error:  # SSLError is one
        files = f"ssl_certfile = {config.ssl_certfile!r}, ssl_keyfile = {config.ssl_keyfile!r}"
        reason = "no pair of a PEM certificate and its unencrypted key" if isinstance(error, ssl.SSLError) else error
        raise ConfigError(f"{files}: {getattr(reason, 'strerror', None) or reason}") from error
