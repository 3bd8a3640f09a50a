"""What each tenant may have. Knows nothing of files (``args/tenants.py``) and of who is which tenant (the server)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.config.option import MAX_TOKENS, require


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """None is no limit."""

    weight: float = 1.0  # share of the engine beside others', with --scheduling-policy fair
    max_running: int | None = None  # sequences in the batch
    max_queued: int | None = None  # sequences that wait
    tokens_per_minute: int | None = None  # of prompts and answers
    max_tokens: int | None = None  # of one answer
    priority: tuple[int, int] | None = None  # the least and the greatest number that its requests may have

    def __post_init__(self) -> None:
        require(0.001 <= self.weight <= 1e6 and math.isfinite(self.weight), "weight", self.weight, "0.001..1e6")
        for name in ("max_running", "max_queued", "tokens_per_minute", "max_tokens"):
            value = getattr(self, name)
            require(value is None or 1 <= value <= MAX_TOKENS, name, value, f"1..{MAX_TOKENS}")
        if self.priority is not None:
            low, high = self.priority
            require(-MAX_TOKENS <= low <= high <= MAX_TOKENS, "priority", self.priority, "two numbers, lower first")


@dataclass(frozen=True, kw_only=True)
class TenantTable:
    """The limits of those that are ``listed``, and the ``default`` of each that is not."""

    default: TenantLimits = TenantLimits()
    listed: dict[str, TenantLimits] = field(default_factory=dict)

    def limits_of(self, name: str) -> TenantLimits:
        return self.listed.get(name, self.default)
