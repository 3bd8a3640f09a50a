"""Queries: all that may be asked of, or told to, the engine core between two steps, and what answers each.

A prefix is named by the hash of its last row of blocks. Seconds are relative: clocks differ between processes. A new
query is a struct here that can merge answers, the struct of its answer (in ``AnyAnswer``), and a handler in
``octavo.core.queries``.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from octavo.exceptions import InvariantError
from octavo.messages.fault import RequestFault

Answer = TypeVar("Answer")


class Query(msgspec.Struct, Generic[Answer], frozen=True):
    """A question or an order that is answered by an ``Answer``."""

    def merge(self, answers: Sequence[Answer]) -> Answer:
        """One answer out of those of several cores, at least one. Every query says how; this raises InvariantError."""
        raise InvariantError(f"{type(self).__name__} does not say how the answers of several cores become one")


class CacheQuery(Query[Answer], frozen=True):
    """A query about cached blocks, or what holds them: pins whose time is over end before it is handled."""


class _AnyFinder(CacheQuery[Answer], frozen=True):
    """A query that any core can answer that has what it names."""

    def merge(self, answers: Sequence[Answer]) -> Answer:
        """The first that found something."""
        return next((one for one in answers if not isinstance(one, NotFound)), answers[0])


Counted = TypeVar("Counted")


class _BlockCount(CacheQuery[Counted], frozen=True):
    """A query whose answer is a number of blocks."""

    def merge(self, answers: Sequence[Counted]) -> Counted:
        """The sum over the cores that found something."""
        counts: list[Any] = [one for one in answers if not isinstance(one, NotFound)]
        if not counts:
            return answers[0]
        total: Counted = type(counts[0])(sum(one.num_blocks for one in counts))
        return total


class NotFound(msgspec.Struct, frozen=True, tag=True):
    """The core has nothing of the name that the query gives."""


# ---- cached prefixes


class PrefixInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix in the block pool. ``head`` and ``tail``: token ids for a preview, never of a salted prefix."""

    prefix: bytes
    num_tokens: int
    num_blocks: int
    num_used_blocks: int  # held by requests or pins
    hits: int  # requests that began with it and took over at least its blocks
    idle: float  # seconds since its last use
    salted: bool
    pin_ids: list[str]
    head: list[int] = []
    tail: list[int] = []


class PinInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A pin. ``num_held``: of its blocks, those that have been computed. ``tenant``: None if an administrator's."""

    pin_id: str
    prefix: bytes
    num_tokens: int
    num_blocks: int
    num_held: int
    tenant: str | None
    expires_in: float


class PrefixList(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers ListPrefixes. ``num_prefixes``: how many there are, listed or not."""

    prefixes: list[PrefixInfo]
    num_prefixes: int
    pins: list[PinInfo]
    num_cached_blocks: int
    num_pinned_blocks: int
    max_pinned_blocks: int


class ListPrefixes(CacheQuery[PrefixList], frozen=True, tag=True):
    """List at most ``limit`` prefixes, with ``num_preview_tokens`` tokens, at most, of either end of each."""

    limit: int
    num_preview_tokens: int = 0

    def merge(self, answers: Sequence[PrefixList]) -> PrefixList:
        """What all cores have, the most recently used first."""
        prefixes = sorted((one for each in answers for one in each.prefixes), key=lambda one: one.idle)
        return PrefixList(
            prefixes=prefixes[: self.limit],
            num_prefixes=sum(each.num_prefixes for each in answers),
            pins=list({pin.pin_id: pin for each in reversed(answers) for pin in each.pins}.values()),
            num_cached_blocks=sum(each.num_cached_blocks for each in answers),
            num_pinned_blocks=sum(each.num_pinned_blocks for each in answers),
            max_pinned_blocks=sum(each.max_pinned_blocks for each in answers),
        )


def new_pin_id() -> str:
    """A name that no pin has had: one of an engine core that has died must not name a pin of the next one."""
    return f"pin-{secrets.token_hex(8)}"


class SetPin(_AnyFinder[PinInfo | NotFound], frozen=True, tag=True):
    """Pin a cached prefix, or the whole blocks of a prompt, for ``ttl`` seconds.

    A new pin gets ``pin_id``: so it has one name in all cores that are asked.
    """

    ttl: float
    pin_id: str = msgspec.field(default_factory=new_pin_id)
    prefix: bytes | None = None
    prompt_token_ids: list[int] = []
    cache_salt: str | None = None


class PinEnded(msgspec.Struct, frozen=True, tag=True):
    """Answers RemovePin."""


class RemovePin(_AnyFinder[PinEnded | NotFound], frozen=True, tag=True):
    """Let a pin go."""

    pin_id: str


class BlocksEvicted(msgspec.Struct, frozen=True, tag=True):
    """Answers EvictPrefixes."""

    num_blocks: int


class EvictPrefixes(_BlockCount[BlocksEvicted | NotFound], frozen=True, tag=True):
    """Forget a prefix with all that follows it (None: every prefix), except what is in use or pinned."""

    prefix: bytes | None = None


class CacheCleared(msgspec.Struct, frozen=True, tag=True):
    """Answers ResetCache. ``num_blocks``: cached ones that were forgotten."""

    num_blocks: int


class ResetCache(_BlockCount[CacheCleared], frozen=True, tag=True):
    """Forget all prefixes; pins end."""


class BlocksSaved(msgspec.Struct, frozen=True, tag=True):
    """Answers SavePrefixes."""

    num_blocks: int


class SavePrefixes(_BlockCount[BlocksSaved | NotFound], frozen=True, tag=True):
    """Have the disk tier keep a prefix (None: every prefix)."""

    prefix: bytes | None = None


class BlocksRestored(msgspec.Struct, frozen=True, tag=True):
    """Answers RestorePrefix."""

    num_blocks: int


class RestorePrefix(_BlockCount[BlocksRestored], frozen=True, tag=True):
    """Load what tiers have of a prompt into the pool."""

    prompt_token_ids: list[int]
    cache_salt: str | None = None


# ---- the block pool

BlockState = Literal["null", "free", "cached", "referenced"]


class BlockPicture(msgspec.Struct, frozen=True, array_like=True):
    """One block. ``group``: the KV group whose K and V it holds, None if it holds none.

    ``cached``: free, but a request may still take it over. ``key``: the first bytes of its name, empty if it has none.
    """

    state: BlockState
    ref_count: int
    group: int | None
    key: bytes


class PoolState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers PoolPicture: all blocks in the order of their ids, how many are in each state, and who holds which.

    ``tables``: by core id of a request, its block ids row by row, one of each KV group; 0 where a window has passed.
    """

    blocks: list[BlockPicture]
    num_blocks: dict[BlockState, int]
    tables: dict[str, list[int]]
    block_size: int
    num_groups: int


class PoolPicture(CacheQuery[PoolState], frozen=True, tag=True):
    """Describe every block of the pool. Takes time by the block."""

    def merge(self, answers: Sequence[PoolState]) -> PoolState:
        """The pools one behind the other: the ids of each are behind those of the one before it."""
        first, tables, base = answers[0], dict[str, list[int]](), 0
        for each in answers:
            tables |= {name: [block and base + block for block in table] for name, table in each.tables.items()}
            base += len(each.blocks)
        return PoolState(
            blocks=[block for each in answers for block in each.blocks],
            num_blocks={state: sum(each.num_blocks[state] for each in answers) for state in first.num_blocks},
            tables=tables,
            block_size=first.block_size,
            num_groups=first.num_groups,
        )


AnyAnswer = (
    NotFound | PrefixList | PinInfo | PinEnded | BlocksEvicted | CacheCleared | BlocksSaved | BlocksRestored | PoolState
)


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What became of a query: the ``answer`` of its kind, or its ``fault``."""

    answer: AnyAnswer | None = None
    fault: RequestFault | None = None

    def result(self, query: Query[Answer]) -> Answer:
        """The answer to ``query``, whose reply this is. Raises the fault: a ValidationError."""
        if self.fault is not None:
            raise self.fault.exception(self.fault.message)
        answer: Any = self.answer
        return answer
