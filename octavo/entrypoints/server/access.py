"""Who may call: API keys, whom each belongs to, and what only administrators may do.

Keys are kept as digests under a secret of this process and looked up by digest, so neither a comparison's time nor a
dump of the table says anything about a key. Knows nothing of HTTP, and never logs a key.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.config import ServerConfig
from octavo.exceptions import ConfigError, OctavoError

logger = logging.getLogger("octavo.server")

MAX_KEY_FILE_BYTES = 16 << 20
RECHECK_SECONDS = 1.0  # between two looks at the key file
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]{1,1024}")


class NotAllowedError(OctavoError):
    """The caller is known, but may not do this (HTTP 403)."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request, by the name of their key. Keys that share a name belong to one caller."""

    name: str
    admin: bool = False


ANYBODY = Caller("", admin=True)  # where no key is configured, everybody may do everything
STRANGER = Caller("stranger")  # no valid key, on a route that needs none


class KeyRing:
    """The keys of ``config``. Those of the key file change with it, within RECHECK_SECONDS.

    Raises ConfigError for a key file that cannot be read, or has no keys, or a malformed line. If a running server
    finds it so, the keys stay as they were, and the log says why.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._secret = secrets.token_bytes(32)
        self._path = config.api_key_file
        self.guarded = bool(config.api_key) or self._path is not None
        self._fixed = {self._digest(key): Caller(self._unnamed(key)) for key in config.api_key}
        self._admins = {self._digest(key): Caller("admin", admin=True) for key in config.admin_api_key}
        self._default = Caller("") if self._admins else ANYBODY
        self._stamp: tuple[int, ...] | None = None
        self._looked = 0.0
        self._callers = {**self._fixed, **self._admins}
        if self._path is not None:
            self._stamp = self._look()
            self._callers = {**self._fixed, **self._read(), **self._admins}

    def find(self, offered: Iterable[bytes]) -> Caller | None:
        """Whose the first valid key of ``offered`` is. None if there is none and one is needed."""
        self._refresh()
        for key in offered:
            if key and (caller := self._callers.get(self._digest(key))) is not None:
                return caller
        return None if self.guarded else self._default

    def reload(self) -> None:
        """Read the key file again, whether or not it seems to have changed."""
        if self._path is None:
            return
        self._stamp, self._looked = self._look(), time.monotonic()
        try:
            if os.path.exists(self._path) and not os.path.isfile(self._path):
                raise self._fault("it is no regular file any more, or never was, and cannot be read again")
            callers = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._callers = {**self._fixed, **callers, **self._admins}
        logger.info("%d API keys read from %s", len(callers), self._path)

    def _refresh(self) -> None:
        if self._path is None or time.monotonic() - self._looked < RECHECK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._look() != self._stamp:
            self.reload()

    def _look(self) -> tuple[int, ...] | None:
        assert self._path is not None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None  # a pipe, as of <(command), can be read only once
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[bytes, Caller]:
        """The key file: one ``key`` or ``name:key`` a line; empty lines and those that begin with # are skipped."""
        callers: dict[bytes, Caller] = {}
        for number, line in enumerate(self._lines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, colon, key = line.strip().partition(":")
            if not colon:
                name, key = "", name
            key = key.strip()
            if not _KEY.fullmatch(key) or (colon and not _NAME.fullmatch(name)):
                raise self._fault(
                    f"line {number} is none of 'key' and 'name:key'; a key is 1 to 1024 printable ASCII characters "
                    "without spaces, a name 1 to 64 letters, digits and .-_"
                )
            digest = self._digest(key)
            if digest in callers:
                raise self._fault(f"the key of line {number} appears twice")
            callers[digest] = Caller(name or self._unnamed(key))
        if not callers:
            raise self._fault("it has no keys")
        return callers

    def _lines(self) -> list[str]:
        assert self._path is not None
        try:
            with open(self._path, "rb") as file:
                content = file.read(MAX_KEY_FILE_BYTES + 1)
            if len(content) > MAX_KEY_FILE_BYTES:
                raise self._fault(f"it is larger than {MAX_KEY_FILE_BYTES} bytes")
            return content.decode("utf-8-sig").split("\n")
        except OSError as error:
            raise self._fault(error.strerror or str(error)) from error
        except UnicodeDecodeError as error:
            raise self._fault("it is not UTF-8 text") from error

    def _fault(self, reason: str) -> ConfigError:
        return ConfigError(f"api_key_file = {self._path!r}: {reason}")

    def _digest(self, key: str | bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() if isinstance(key, str) else key, "sha256")

    def _unnamed(self, key: str) -> str:
        """A name that tells keys apart and nothing about them; it changes with every start."""
        return f"key-{self._digest(key).hex()[:8]}"
