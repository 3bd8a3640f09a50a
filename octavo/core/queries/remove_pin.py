"""RemovePin: let a pin go. Changes the pins; the blocks stay cached."""

from __future__ import annotations

from octavo.core.queries import CoreState
from octavo.messages import NotFound, PinEnded, RemovePin


def answer(query: RemovePin, core: CoreState) -> PinEnded | NotFound:
    """Whether there was such a pin."""
    return PinEnded() if core.kv.cache.pins.remove(query.pin_id) else NotFound()
