"""What tenants may have: checked at the door, counted while they use it. Knows nothing of keys or headers.

A tenant that the table does not list has the default limits, each for itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from octavo.config import TenantTable
from octavo.exceptions import OverloadedError, ValidationError
from octavo.messages import SamplingParams, SchedulingOptions, Tenant

MAX_BUCKETS = 4096  # more, and those that are full are forgotten: a new one would be full too


class TokenBucket:
    """Holds what may be used in a minute, and fills up at that rate.

    How long an answer becomes is known too late, so the bucket may be overdrawn; then :meth:`wait` until it is not.
    """

    __slots__ = ("_clock", "_level", "_per_second", "_time", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self._per_second, self._clock = per_minute, per_minute / 60.0, clock
        self._level, self._time = float(per_minute), clock()

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._time) * self._per_second)
        self._time = now

    def use(self, num_tokens: int) -> None:
        self._fill()
        self._level -= num_tokens

    @property
    def is_full(self) -> bool:
        self._fill()
        return self._level >= self.per_minute

    def wait(self) -> float:
        """Seconds until there is a token; 0.0: now."""
        self._fill()
        return 0.0 if self._level >= 1 else (1 - self._level) / self._per_second


class Tenants:
    """The limits of ``table``, and how much of them is used. ``clock`` gives seconds."""

    def __init__(self, table: TenantTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table, self._clock = table, clock
        self.labels = tuple(dict.fromkeys([*table.listed, "other"]))  # in metrics; those never change
        self._labelled = frozenset(self.labels)
        self._queued: Counter[str] = Counter()  # sequences, by tenant; no zeros
        self._buckets: dict[str, TokenBucket] = {}

    def label(self, name: str) -> str:
        """The tenant's name in metrics: only those of the first table have one of their own."""
        return name if name in self._labelled else "other"

    def replace(self, table: TenantTable) -> None:
        """From now on ``table`` holds. What was used of a minute stays used, unless tokens_per_minute has changed."""
        self._table = table

    def tenant(self, name: str) -> Tenant:
        """What the scheduler must know."""
        limits = self._table.limits_of(name)
        return Tenant(name, limits.weight, limits.max_running)

    def bound(self, params: SamplingParams, scheduling: SchedulingOptions, *, explicit: bool) -> SamplingParams:
        """``params`` with no more max_tokens than the tenant may ask for.

        Raises ValidationError for a priority out of its range, and where more tokens were asked for in words
        (``explicit``).
        """
        limits, priority = self._table.limits_of(scheduling.tenant.name), scheduling.priority
        if limits.priority is not None and not limits.priority[0] <= priority <= limits.priority[1]:
            low, high = limits.priority
            message = f"priority must be in [{low}, {high}] for this tenant, got {priority}"
            raise ValidationError(message, parameter="priority", value=priority)
        most, wanted = limits.max_tokens, params.max_tokens
        if most is None or (wanted is not None and wanted <= most):
            return params
        if explicit:
            message = f"max_tokens must be at most {most} for this tenant, got {wanted}"
            raise ValidationError(message, parameter="max_tokens", value=wanted)
        return params.replace(max_tokens=most)

    def check(self, name: str, num_seqs: int) -> None:
        """Raises OverloadedError, naming the limit, if ``num_seqs`` more may not wait, or its minute is used up."""
        limits = self._table.limits_of(name)
        queued = self._queued[name]
        if limits.max_queued is not None and queued and queued + num_seqs > limits.max_queued:
            raise OverloadedError(
                f"{queued} sequences of this tenant are waiting, and its max_queued is {limits.max_queued}",
                reason="tenant_max_queued",
            )
        if limits.tokens_per_minute is not None and (wait := self._bucket(name, limits.tokens_per_minute).wait()):
            raise OverloadedError(
                f"this tenant has used up its tokens_per_minute, {limits.tokens_per_minute}; there will be some again "
                f"in {wait:.1f} s",
                reason="tenant_tokens_per_minute",
                retry_after=wait,
            )

    def queue(self, name: str, num_seqs: int) -> None:
        """``num_seqs`` more sequences wait (negative: fewer)."""
        self._queued[name] += num_seqs
        if not self._queued[name]:
            del self._queued[name]

    def use(self, name: str, num_tokens: int) -> None:
        """Tokens of a prompt that was taken in, or of an answer."""
        limit = self._table.limits_of(name).tokens_per_minute
        if limit is not None:
            self._bucket(name, limit).use(num_tokens)

    def _bucket(self, name: str, per_minute: int) -> TokenBucket:
        bucket = self._buckets.get(name)
        if bucket is None or bucket.per_minute != per_minute:
            if len(self._buckets) >= MAX_BUCKETS:
                self._buckets = {one: kept for one, kept in self._buckets.items() if not kept.is_full}
            bucket = self._buckets[name] = TokenBucket(per_minute, self._clock)
        return bucket
