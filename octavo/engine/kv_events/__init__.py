"""Publishers of KV events, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.config import KVEventsConfig
from octavo.config.choices import KV_EVENT_PUBLISHERS
from octavo.messages import KVEvent
from octavo.utils.registry import resolve


class KVEventPublisher(Protocol):
    """Tells others of KV events. Never blocks and never raises: a listener that is too slow misses some."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Pass on what happened in a step, perhaps nothing."""
        ...

    def close(self) -> None:
        """Tell no more; idempotent."""
        ...


class NullPublisher:
    """Drops all events: nothing listens."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Nothing is opened."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def make_publisher(config: KVEventsConfig) -> KVEventPublisher:
    """The publisher that ``config`` asks for. Raises ConfigError if an endpoint cannot be had."""
    publisher: KVEventPublisher = resolve(KV_EVENT_PUBLISHERS["zmq" if config.enabled else "null"])(config)
    return publisher
