"""Flags and keyword arguments, generated from the fields of the config dataclasses.

A field's metadata says how it becomes a flag: ``help``, ``positional``, ``size`` (bytes, "2GiB"), ``tokens`` ("32k"),
``json`` (an object, of a dataclass's fields where the field's type is one), ``env`` (a variable read when the flag is
absent). A tuple's flag may be repeated. Defaults stay in the dataclasses: an absent flag is simply not passed on. Knows
nothing of files, hardware or models; see ``resolve.py`` for those.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from octavo.config import (
    BackendConfig,
    CacheConfig,
    ChatConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    QueueConfig,
    SamplingConfig,
    SchedulerConfig,
    ServerConfig,
    StructuredOutputsConfig,
    SupervisorConfig,
)
from octavo.config.option import choices_of, one_of, require
from octavo.exceptions import ConfigError

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "backend": BackendConfig,
    "sampling": SamplingConfig,
    "queue": QueueConfig,
    "supervisor": SupervisorConfig,
    "structured_outputs": StructuredOutputsConfig,
}

# what other engines have and this one has not -> why, or what to write instead
ABSENT = {
    "enable_prompt_tokens_details": "cached_tokens are always in usage; leave it out",
    "gpu_memory_utilization": "say in bytes how much memory the KV cache gets: --kv-cache-memory 2GiB",
    "kv_cache_memory_bytes": "it is called --kv-cache-memory here",
    "kv_offloading_size": "it is called --swap-space here (GiB)",
    "trust_remote_code": "octavo runs no code that comes with a model (architectures are its own, weights are GGUF or "
    "safetensors, templates run in a sandbox), so there is nothing to trust; leave it out",
}

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)
_AUTO = ("auto", "-1")  # what vLLM writes for a number that the engine shall find
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes in ``"2GiB"``, ``"512M"``, ``"1.5g"``, ``"1e9"``. K, M, G, T are powers of 1024; KB, MB ... of 1000."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write it like 2GiB, 512M or 1e9")
    number, prefix, unit = match.groups()
    base = 1000 if unit.lower() == "b" else 1024
    return int(float(number) * base ** _POWER[prefix.lower()])


def parse_tokens(text: str) -> int:
    """A number of tokens: ``"32768"`` or ``"32k"`` (k is 1024, as context lengths are spoken)."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([km]?)\s*", text, re.IGNORECASE)
    if match is None or ("." in match[1] and not match[2]):
        raise ConfigError(f"{text!r} is not a number of tokens; write it like 32768 or 32k")
    return int(float(match[1]) * 1024 ** _POWER[match[2].lower()])


def parse_json(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r} is not a JSON object")
    return value


def parse_list(text: str) -> list[str]:
    """A JSON list of strings, as vLLM's flags take them; any other text is one item."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError:
        value = None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    return [text]


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """(type without None, whether None is allowed)."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        return inner[0], True
    return annotation, False


def converter(metadata: Mapping[str, Any], kind: Any) -> Callable[[str], Any]:
    """A ``type`` for argparse; ``metadata``: those of ``option``, such as ``size``."""
    convert: Callable[[str], Any] = kind
    if metadata.get("size"):
        convert = parse_size
    elif metadata.get("tokens"):
        convert = parse_tokens
    elif metadata.get("json"):
        convert = parse_json

    def parse(text: str) -> Any:
        if metadata.get("auto") and text.strip().lower() in _AUTO:
            return None
        try:
            return convert(text)
        except (ConfigError, ValueError) as error:
            message = str(error) if isinstance(error, ConfigError) else f"{text!r} is not a valid {kind.__name__}"
            raise argparse.ArgumentTypeError(message) from error

    return parse


def _add_field(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], kind: Any, positional: bool) -> None:
    """One field as one argument. ``argparse.SUPPRESS`` keeps absent flags out of the namespace."""
    text = field.metadata["help"].replace("%", "%%")
    if field.metadata.get("env"):
        text += f" (or ${field.metadata['env']})"
    if field.default not in (None, ()) and "default" not in text:
        text += f" (default: {field.default})"
    common: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
    flag = "--" + field.name.replace("_", "-")
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif field.metadata.get("positional") and positional:
        group.add_argument(field.name, nargs="?", metavar=field.name.upper(), **common)
    elif get_origin(kind) is tuple:
        group.add_argument(flag, type=parse_list, action="extend", metavar=field.name.upper(), **common)
    elif choices := choices_of(field, kind):
        group.add_argument(flag, choices=choices, **common)
    else:
        metavar = "SIZE" if field.metadata.get("size") else "N" if kind in (int, float) else field.name.upper()
        group.add_argument(flag, type=converter(field.metadata, kind), metavar=metavar, **common)


class _Absent(argparse.Action):
    """A flag that is refused with its reason."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise argparse.ArgumentError(self, ABSENT[self.dest])


def _add_section(parser: argparse.ArgumentParser, title: str, config: type, positional: bool) -> None:
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        kind, _ = _unwrap(hints[field.name])
        _add_field(group, field, kind, positional)


def add_engine_arguments(parser: argparse.ArgumentParser, *, positional_model: bool = True) -> None:
    """A flag for every field of EngineConfig's sections. MODEL is positional, or ``--model`` where that is taken."""
    for title, config in SECTIONS.items():
        _add_section(parser, title, config, positional_model)
    for name in ABSENT:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, action=_Absent, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of ServerConfig, ChatConfig and LogConfig."""
    _add_section(parser, "server", ServerConfig, False)
    _add_section(parser, "log", LogConfig, False)
    _add_section(parser, "chat", ChatConfig, False)


def _check_kind(field: dataclasses.Field[Any], annotation: Any, value: Any) -> Any:
    """``value`` for ``field``, sizes given as text converted; ConfigError where the type is wrong."""
    kind, optional = _unwrap(annotation)
    if value is None and optional:
        return None
    if field.metadata.get("auto") and str(value).lower() in _AUTO:
        return None
    if isinstance(value, str) and field.metadata.get("size"):
        return parse_size(value)
    if isinstance(value, str) and field.metadata.get("tokens"):
        return parse_tokens(value)
    if isinstance(value, str) and field.metadata.get("json"):
        value = parse_json(value)
    if isinstance(value, dict) and dataclasses.is_dataclass(kind):
        return _from_object(field.name, kind, value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if choices := choices_of(field, kind):
        one_of(field.name, value, choices)
        return value
    ok = isinstance(value, get_origin(kind) or kind) and (kind is bool or not isinstance(value, bool))
    require(ok, field.name, value, (get_origin(kind) or kind).__name__)
    return value


def _from_object(name: str, kind: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass ``kind`` from a JSON object. Raises ConfigError naming ``name`` and the key that is wrong."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{name} has no key {key!r}; known are {', '.join(known)}")
    missing = [key for key, field in known.items() if field.default is dataclasses.MISSING and key not in values]
    if missing:
        raise ConfigError(f"{name} lacks {' and '.join(missing)}")
    hints = get_type_hints(kind)
    try:
        return kind(**{key: _check_kind(known[key], hints[key], value) for key, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _build(config: type, values: Mapping[str, Any]) -> Any:
    """``config`` from those of ``values`` that are its fields, then from the environment, then its defaults."""
    hints = get_type_hints(config)
    chosen = {}
    for field in dataclasses.fields(config):
        variable = field.metadata.get("env")
        if field.name in values:
            chosen[field.name] = _check_kind(field, hints[field.name], values[field.name])
        elif variable and os.environ.get(variable):
            given = os.environ[variable]
            several = get_origin(_unwrap(hints[field.name])[0]) is tuple
            chosen[field.name] = tuple(given.split()) if several else given
    return config(**chosen)


def engine_config_from_kwargs(**kwargs: Any) -> EngineConfig:
    """EngineConfig from flat keyword arguments, e.g. ``model=..., max_model_len=..., kv_cache_memory="2GiB"``.

    Raises ConfigError for a value out of range and for an unknown name, which is never dropped silently.
    """
    known = [field.name for config in SECTIONS.values() for field in dataclasses.fields(config)]
    for name in kwargs:
        if name in ABSENT and not kwargs[name]:
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; known are {', '.join(sorted(known))}"
            hint = f": {ABSENT[name]}" if name in ABSENT else hint
            raise ConfigError(f"unknown argument {name!r}{hint}")
    return EngineConfig(**{section: _build(config, kwargs) for section, config in SECTIONS.items()})


def engine_config_from_namespace(namespace: argparse.Namespace) -> EngineConfig:
    """EngineConfig from parsed flags; names that belong to no section are left alone. Raises ConfigError."""
    values = vars(namespace)
    return EngineConfig(**{section: _build(config, values) for section, config in SECTIONS.items()})


def server_config_from_namespace(namespace: argparse.Namespace) -> ServerConfig:
    """ServerConfig from parsed flags and the environment. Raises ConfigError."""
    config: ServerConfig = _build(ServerConfig, vars(namespace))
    return config


def chat_config_from_namespace(namespace: argparse.Namespace) -> ChatConfig:
    """ChatConfig from parsed flags. Raises ConfigError."""
    config: ChatConfig = _build(ChatConfig, vars(namespace))
    return config


def log_config_from_namespace(namespace: argparse.Namespace) -> LogConfig:
    """LogConfig from parsed flags. Raises ConfigError."""
    config: LogConfig = _build(LogConfig, vars(namespace))
    return config
