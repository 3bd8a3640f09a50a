"""The file of ``--tenants``, in TOML (which Python reads by itself):

[default]                    # each tenant that is not listed
tokens_per_minute = 20_000

[tenants.acme]               # the name of its key in --api-key-file, or what --tenant-header says
weight = 4
max_running = 8
priority = [-1, 5]
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from typing import Any

from octavo.config import TenantLimits, TenantTable
from octavo.exceptions import ConfigError

MAX_FILE_BYTES = 16 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KINDS = {field.name: float if field.name == "weight" else int for field in dataclasses.fields(TenantLimits)}


def read_tenants(path: str) -> TenantTable:
    """The table in a file. Raises ConfigError naming the file, the tenant, and what is wrong."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"tenants = {path!r}: larger than {MAX_FILE_BYTES} bytes")
        document = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"tenants = {path!r}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"tenants = {path!r}: not TOML: {error}") from error
    unknown = sorted(set(document) - {"default", "tenants"})
    listed = document.get("tenants", {})
    if unknown or not isinstance(listed, dict):
        found = f"unknown {unknown[0]!r}" if unknown else "tenants is no table"
        raise ConfigError(f"tenants = {path!r}: {found}; write [default] and [tenants.NAME]")
    default = _limits(path, "default", document.get("default", {}))
    table = {name: _limits(path, f"tenants.{name}", given) for name, given in listed.items()}
    for name in table:
        if not NAME.fullmatch(name):
            raise ConfigError(f"tenants = {path!r}: the name {name[:80]!r} must be 1 to 64 letters, digits and .-_")
    return TenantTable(default=default, listed=table)


def _limits(path: str, where: str, given: Any) -> TenantLimits:
    if not isinstance(given, dict):
        raise ConfigError(f"tenants = {path!r}: {where} is no table")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _KINDS:
            close = difflib.get_close_matches(name, _KINDS) or list(_KINDS)
            raise ConfigError(f"tenants = {path!r}: {where}.{name} is unknown; did you mean {' or '.join(close)}?")
        if name == "priority":
            ok = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
            value = tuple(value) if ok else value
        else:
            ok = type(value) is int or (type(value) is float and _KINDS[name] is float)
        if not ok:
            kind = "two whole numbers" if name == "priority" else f"of type {_KINDS[name].__name__}"
            raise ConfigError(f"tenants = {path!r}: {where}.{name} = {str(value)[:80]!r}: must be {kind}")
        values[name] = value
    try:
        return TenantLimits(**values)
    except ConfigError as error:
        raise ConfigError(f"tenants = {path!r}: {where}.{error}") from None
