"""Fields of the config dataclasses: how one is declared, what it may be, and the checks they share."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import Field, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.exceptions import ConfigError

MAX_TOKENS = 2**31 - 1  # of a context, and of a step
MAX_SECONDS = 1e6  # of any time-out


def option(default: Any, help: str, **meta: Any) -> Any:
    """A dataclass field that is also a command-line flag; ``help`` is its help text.

    ``choices``: the names that it may have, e.g. a table of ``config/choices.py``. ``secret``: no repr shows it.
    """
    return field(default=default, repr=not meta.get("secret"), metadata={"help": help, **meta})


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raises ConfigError, saying that ``name`` must be ``rule``, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{name} = {value!r}: must be {rule}")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError, naming all ``choices``, unless ``value`` is one of them."""
    known = tuple(choices)
    require(value in known, name, value, " or ".join(known) if len(known) <= 2 else f"one of {', '.join(known)}")


def choices_of(field: Field[Any], kind: Any) -> tuple[str, ...]:
    """What ``field`` of type ``kind`` may be: its ``choices``, or the values of its Literal; empty for any other."""
    return tuple(field.metadata.get("choices") or (get_args(kind) if get_origin(kind) is Literal else ()))


def check_choices(config: Any) -> None:
    """Raises ConfigError unless every field of the dataclass ``config`` that has choices is one of them."""
    for name, choices in _all_choices(config.__class__).items():
        one_of(name, getattr(config, name), choices)


@functools.cache
def _all_choices(config: Any) -> dict[str, tuple[str, ...]]:
    """Of the dataclass ``config``: the choices of each field that has some."""
    hints = get_type_hints(config)
    found = {field.name: choices_of(field, hints[field.name]) for field in fields(config)}
    return {name: choices for name, choices in found.items() if choices}
