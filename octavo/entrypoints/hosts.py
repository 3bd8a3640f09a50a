"""By which names the server may be called: against web pages that point a name of their own at this machine.

A browser lets a page talk to its own origin. If the page's name comes to mean 127.0.0.1 (DNS rebinding), that origin is
this server, and neither CORS nor a content type keeps the page out; the Host header does, for it has the page's name.
An address is no name: a page that is called by one can only be of that machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints.openai.errors import error_response
from octavo.entrypoints.state import ServerState

ANY_HOST = "*"
LOCAL_HOSTS = ("localhost", "*.localhost")


def host_names(state: ServerState) -> Sequence[str]:
    """The names of ``state``'s server. Where a key is needed, a page has none, by whatever name it calls."""
    if state.config.allowed_hosts:
        return state.config.allowed_hosts
    return LOCAL_HOSTS if state.only_local and not state.keys.guarded else (ANY_HOST,)


class HostGuard:
    """Requests by other names than ``names`` get a 421. ``*.a.example`` stands for all names below a.example.

    Addresses are always let in, and so is a request without the header, which no browser sends.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app = app
        self._names = {name.lower() for name in names if not name.startswith("*")}
        self._endings = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._any = ANY_HOST in names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._any:
            await self.app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"host" and not self._knows(host := _host(value.decode("latin-1"))):
                refusal = f"this server is not called {host[:100]!r}; the server's flag --allowed-hosts adds names"
                await error_response(421, refusal, path=scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        return not host or host in self._names or host.endswith(self._endings) or _is_address(host)


def _host(header: str) -> str:
    """``header`` without its port, in lower case."""
    if header.startswith("["):  # an IPv6 address has colons of its own
        return header.partition("]")[0][1:].lower()
    return header.partition(":")[0].rstrip(".").lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
