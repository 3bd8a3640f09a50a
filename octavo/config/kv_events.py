"""Configuration of the stream of KV events, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from octavo.config.choices import KV_EVENT_PUBLISHERS
from octavo.config.option import one_of
from octavo.exceptions import ConfigError

MOST = 10**7


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Where KV events go. ``publisher`` None: zmq where they are enabled.

    An ``endpoint`` with a wildcard, and an ipc one, is bound; any other is connected to. ``buffer_steps`` batches are
    kept for who asks at ``replay_endpoint``; ``hwm`` wait for a slow subscriber, ``max_queue_size`` for the publisher.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        kinds = {"enable_kv_cache_events": bool, "buffer_steps": int, "hwm": int, "max_queue_size": int}
        for one in fields(self):
            value, kind = getattr(self, one.name), kinds.get(one.name, str)
            optional = one.name in ("publisher", "replay_endpoint") and value is None
            if not optional and type(value) is not kind:
                raise ConfigError(f"kv_events_config: {one.name} = {value!r}: must be {kind.__name__}")
            if kind is int and not 1 <= value <= MOST:
                raise ConfigError(f"kv_events_config: {one.name} = {value}: must be 1..{MOST}")
        if self.publisher is not None:
            one_of("kv_events_config: publisher", self.publisher, KV_EVENT_PUBLISHERS)
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is not None and not address.startswith(("tcp://", "ipc://", "inproc://")):
                raise ConfigError(
                    f"kv_events_config: {name} = {address!r}: must begin with tcp://, ipc:// or inproc://"
                )

    @classmethod
    def of(cls, values: dict[str, Any] | None) -> KVEventsConfig:
        """From the flag's object. Raises ConfigError for unknown names and wrong values."""
        known = [one.name for one in fields(cls)]
        for name in values or {}:
            if name not in known:
                raise ConfigError(f"kv_events_config: unknown field {name!r}; known are {', '.join(known)}")
        return cls(**(values or {}))

    @property
    def enabled(self) -> bool:
        """Whether anybody may listen."""
        return self.enable_kv_cache_events and self.publisher != "null"
