"""Whom a request belongs to, as far as the scheduler must know."""

from __future__ import annotations

import msgspec


class Tenant(msgspec.Struct, frozen=True, array_like=True):
    """Requests of the same ``name`` share what a tenant may have. ``weight`` is its share beside others'."""

    name: str = ""
    weight: float = 1.0
    max_running: int | None = None  # sequences in the batch
