"""BlockPool and KVCacheManager against plain models: sets, lists and the contents written to each block."""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.block_pool import BlockPool
from octavo.core.kv_cache.event_log import EventLog
from octavo.core.kv_cache.manager import KVCacheManager, Room
from octavo.core.kv_cache.misses import Misses
from octavo.core.kv_cache.pins import PinLimits
from octavo.core.kv_cache.prefix_index import make_index
from octavo.core.kv_cache.prefix_tree import PrefixTree, blocks_of
from octavo.core.queries import CoreState, reply_to
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.messages import (
    FULL,
    Answer,
    BlockRemoved,
    BlockStored,
    EvictPrefixes,
    ListPrefixes,
    NotFound,
    Query,
    RemovePin,
    SetPin,
)
from tests.core.checking_worker import make_request
from tests.property.test_radix_index_machine import Listener

OWNER = Request(make_request("r", [0]), SOLO, limit=1000, queued_time=0.0)
OWNER.hashes(1)


class PoolMachine(RuleBasedStateMachine):
    """The free list is modelled as a Python list, in the order in which blocks must be taken."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.index = make_index("hash", 1, 1, lambda: 0.0)
        self.listener = Listener()
        self.index.names.observers = [self.listener]
        self.pool = BlockPool(num_blocks, self.index)
        self.free = list(range(1, num_blocks))
        self.held: list[list[Block]] = []
        self.names: dict[int, bytes] = {}
        self.num_names = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            return
        blocks = self.pool.allocate(count)
        assert [block.block_id for block in blocks] == self.free[:count]
        self.free = self.free[count:]
        for block in blocks:
            self.names.pop(block.block_id, None)
        self.held.append(blocks)

    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        blocks = [block for table in self.held for block in table if not block.is_cached]
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.num_names += 1
            self.names[block.block_id] = b"%d" % self.num_names
            self.index.names.add(self.names[block.block_id], block, OWNER, 0)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.names.values())), unique=True)) if self.names else []
        blocks = [self.index.names.blocks[name] for name in names]
        self.pool.acquire(blocks)
        self.free = [i for i in self.free if i not in {block.block_id for block in blocks}]
        self.held.append(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.held:
            return
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        still_held = {block.block_id for table in self.held for block in table}
        self.pool.free(reversed(blocks))
        for block_id in [block.block_id for block in reversed(blocks)]:
            if block_id not in still_held:
                self.free.insert(len(self.free) if block_id in self.names else 0, block_id)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.pool.blocks[1:]), unique=True))
        self.pool.touch(chosen)
        touched = [block.block_id for block in chosen if block.ref_count == 0]
        self.free = [i for i in self.free if i not in touched] + touched

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.pool.blocks[1:]))
        self.pool.discard(block)
        if block.ref_count == 0:
            self.free = [block.block_id, *(i for i in self.free if i != block.block_id)]

    @rule()
    def forget_names(self) -> None:
        self.pool.index.clear()
        self.names.clear()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        references: dict[int, int] = {}
        for table in self.held:
            for block in table:
                references[block.block_id] = references.get(block.block_id, 0) + 1
        self.pool.check_invariants(references)
        assert self.pool.num_free == len(self.free)
        assert self.listener.known == self.index.names.blocks
        assert {b.block_id: b.key for b in self.pool.blocks if b.is_cached} == self.names


def ask(core: CoreState, query: Query[Answer]) -> Answer:
    return reply_to(query, core).result(query)


def follow(told: set[tuple[int, int]], manager: KVCacheManager) -> None:
    """Apply the latest KV events to ``told``: then it is what can be found, by (hash, group)."""
    for event in manager.cache.events.take():
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            told |= {(one, event.group_idx or 0) for one in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            gone = {(one, event.group_idx or 0) for one in event.block_hashes}
            assert gone <= told
            told -= gone
        else:
            told.clear()
    keys = manager.index.names.blocks
    assert told == {(int.from_bytes(key[24:32]), int.from_bytes(key[32:])) for key in keys}


class ManagerMachine(RuleBasedStateMachine):
    """Each slot remembers the sequence written up to it; a request must always find exactly its own in its table."""

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.sampled_from([True, True, True, False]),
        index=st.sampled_from(["hash", "radix"]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, index: str) -> None:
        limits = PinLimits(num_blocks // 2 * caching, num_blocks)
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching,
            prefix_index=index,
            pin_limits=limits,
            events=EventLog((FULL,)),
        )
        self.core = CoreState(self.manager, {}, [], time.monotonic)
        self.told: set[tuple[int, int]] = set()  # the blocks that KV events speak of
        self.caching = caching
        self.contents: dict[int, list[tuple[object, ...]]] = {}  # by block, then by offset
        self.running: list[Request] = []
        self.count = 0

    def write(self, request: Request, start: int) -> None:
        """The slots of all tokens from ``start`` on now stand for salt and tokens up to themselves."""
        table = self.manager.block_ids(request)
        size = self.manager.block_size
        for position in range(start, request.num_computed_tokens):
            assert self.manager.pool.blocks[table[position // size]].ref_count == 1, "a write into a shared block"
            cells = self.contents.setdefault(table[position // size], [()] * size)
            cells[position % size] = self.history(request, position)

    def history(self, request: Request, position: int) -> tuple[object, ...]:
        return (request.source.cache.salt, *request.token_ids[: position + 1])

    def copy(self, room: Room) -> None:
        for source, destination in room.copies:
            self.contents[destination] = list(self.contents[source])

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from([None, "a"]),
        chunk=st.integers(1, 14),
    )
    def admit(self, prompt: list[int], salt: str | None, chunk: int) -> object:
        request = Request(make_request(f"r{self.count}", prompt, salt=salt), SOLO, limit=1000, queued_time=0.0)
        self.count += 1
        prefix = self.manager.find_prefix(request)
        size = self.manager.block_size
        cached = prefix.num_tokens
        assert cached < len(prompt)
        assert self.caching or not cached
        for i, block in enumerate(prefix.blocks):
            assert self.contents[block.block_id][-1] == (salt, *prompt[: (i + 1) * size])
        if prefix.source is not None:
            assert self.contents[prefix.source.block_id][cached % size - 1] == (salt, *prompt[:cached])
        assert len(prefix.blocks) == cached // size
        num_free = self.manager.pool.num_free
        room = self.manager.admit(request, prefix, min(chunk, len(prompt) - cached))
        if room is None:
            assert self.manager.pool.num_free == num_free
            return multiple()
        assert room.block_ids == self.manager.block_ids(request)
        self.copy(room)
        self.manager.take_moves(self.count)
        request.start(cached, 0.0)
        self.running.append(request)
        self.advance(request, min(chunk, len(prompt) - cached))
        return request

    def advance(self, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        if request.advance(count):
            request.num_placeholders -= 1
        self.write(request, start)
        self.manager.share(request)
        request.num_confirmed_tokens = request.num_computed_tokens

    @rule(request=requests, chunk=st.integers(1, 6), token_id=st.integers(0, 1))
    def extend(self, request: Request, chunk: int, token_id: int) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(token_id)
        count = min(chunk, request.num_tokens - request.num_computed_tokens)
        before, num_free = self.manager.block_ids(request), self.manager.pool.num_free
        size = self.manager.block_size
        shares = request.num_computed_tokens % size != 0 and self.manager.pool.blocks[before[-1]].ref_count > 1
        needed = -(-(request.num_computed_tokens + count) // size) - len(before) + shares
        room = self.manager.extend(request, count)
        assert (room is None) == (needed > num_free)
        if room is None:
            assert (self.manager.block_ids(request), self.manager.pool.num_free) == (before, num_free)
            return
        kept = before[: len(before) - room.num_replaced]
        assert self.manager.block_ids(request) == [*kept, *room.block_ids]
        self.copy(room)
        self.advance(request, count)

    @rule(target=requests, parent=requests, data=st.data())
    def fork(self, parent: Request, data: st.DataObject) -> Request:
        """A child of the parent's first tokens, computed and followed by one more, as after sampling."""
        count = data.draw(st.integers(1, parent.num_computed_tokens))
        num_free = self.manager.pool.num_free
        child = parent.fork(make_request(f"r{self.count}", [0], salt=parent.source.cache.salt), SOLO, limit=1000)
        self.count += 1
        child.token_ids = [*parent.token_ids[:count], data.draw(st.integers(0, 1))]
        child.block_hashes = child.block_hashes[: count // self.manager.block_size]
        self.manager.fork(parent, child, count)
        child.start(count, 0.0)
        self.running.append(child)
        assert self.manager.pool.num_free == num_free
        return child

    @rule(data=st.data())
    def can_gain(self, data: st.DataObject) -> None:
        """What it promises is what dropping the tables gives."""
        if not self.running:
            return
        one = data.draw(st.sampled_from(self.running))
        chosen = [r for r in self.running if r is not one and data.draw(st.booleans())]
        kept = [self.manager.block_ids(r) for r in self.running if r is not one and r not in chosen]
        kept.append([block.block_id for block in self.manager.cache.pins.held])
        blocks = {b for r in chosen for b in self.manager.block_ids(r)}
        own = self.manager.block_ids(one)
        freed = blocks.difference(own, *kept)
        unshared = own[-1] in blocks and not any(own[-1] in table for table in kept)
        assert self.manager.can_gain(one, chosen) == (bool(freed) or unshared)

    @rule(request=consumes(requests), spoiled=st.sampled_from([False, False, True]))
    def free(self, request: Request, spoiled: bool) -> None:
        self.manager.free(request, spoiled=spoiled)
        self.running.remove(request)
        request.finish()

    @rule(
        prompt=st.lists(st.integers(0, 1), max_size=14),
        salt=st.sampled_from([None, "a"]),
        ttl=st.sampled_from([0.0, 1000.0]),
    )
    def pin(self, prompt: list[int], salt: str | None, ttl: float) -> None:
        reply_to(SetPin(ttl, prompt_token_ids=prompt, cache_salt=salt), self.core)

    @rule(index=st.integers(0, 5))
    def unpin(self, index: int) -> None:
        for pin in self.manager.cache.pins.pins[index : index + 1]:
            reply_to(RemovePin(pin.pin_id), self.core)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        found = ask(self.core, ListPrefixes(100)).prefixes  # lets go of pins whose time is over
        pinned = self.manager.cache.pins.held
        one = data.draw(st.sampled_from([None, *(prefix.prefix for prefix in found)]))
        assert ask(self.core, EvictPrefixes(one)) != NotFound()
        assert self.manager.cache.pins.held == pinned

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from([None, "a"]))
    def explain(self, prompt: list[int], salt: str | None) -> None:
        """Misses that have followed every change say what those say that look for the first time."""
        request = Request(make_request("?", prompt, salt=salt), SOLO, limit=1000, queued_time=0.0)
        prefix = self.manager.find_prefix(request)
        fresh = Misses(self.manager.index.names, self.manager.block_size)
        told = self.manager.cache.misses.explain(request, prefix.num_tokens)
        assert told == fresh.explain(request, prefix.num_tokens)
        assert told.num_found == prefix.num_tokens <= told.position < len(prompt)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants(self.running)
        tree, pins = PrefixTree(self.manager.index.names.entries()), self.manager.cache.pins
        assert len(pins.held) <= pins.num_blocks <= pins.limits.blocks
        for row in tree.rows.values():
            path = tree.path(row.row_hash)
            tokens = [token_id for one in path for token_id in one.token_ids]
            for block in blocks_of([row]) if path else []:
                assert self.contents[block.block_id][-1] == (row.salt, *tokens), "its entry knows it wrongly"
        follow(self.told, self.manager)
        self.check_order_of_eviction()
        for request in self.running:
            size, table = self.manager.block_size, self.manager.block_ids(request)
            for position in range(request.num_computed_tokens):
                cell = self.contents[table[position // size]][position % size]
                assert cell == self.history(request, position), "a running request's block was overwritten"

    def check_order_of_eviction(self) -> None:
        """What continues a prefix is taken before the prefix."""
        free = [block.block_id for block in self.manager.pool._free]
        for block in self.manager.pool.blocks:
            node = block.entry.node if block.entry is not None else None
            if node is None or block.ref_count > 0:
                continue
            place = node.blocks.index(block)
            before = node.blocks[place - 1 :][:1] if place else node.parent.blocks[-1:]  # type: ignore[union-attr]
            for earlier in before:
                assert earlier.ref_count > 0 or free.index(block.block_id) < free.index(earlier.block_id)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
