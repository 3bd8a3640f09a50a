"""Block tables, one or several a request, over a pool with tiers behind it: each request finds all that its next token
sees, whatever is forked, freed, pinned, evicted, loaded, swapped out or lost on the way, and no block is lost.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.kv_cache.event_log import EventLog
from octavo.core.kv_cache.manager import KVCacheManager, Room
from octavo.core.kv_cache.names import block_key
from octavo.core.kv_cache.pins import PinLimits
from octavo.core.kv_cache.prefix_finder import Prefix
from octavo.core.queries import CoreState, reply_to
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.messages import (
    EvictPrefixes,
    KVTierReport,
    ModelRunnerOutput,
    Query,
    RemovePin,
    RestorePrefix,
    SavePrefixes,
    SchedulerOutput,
    SetPin,
    blocks_at_once,
)
from tests.core.checking_worker import make_request
from tests.core.kv_parts import host_tier, kv_specs
from tests.property.test_kv_cache_machine import follow

Cell = tuple[object, ...]
WINDOWS = [[None], [None], [3], [1], [None, 1], [2, None], [6, 3], [None, 2, 6]]


TEXTS = [[i % 3 % 2 for i in range(20)], [i % 3 % 2 for i in range(9)] + [1] * 11]  # with a beginning in common

PROMPTS = st.tuples(
    st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 20)),
    st.sampled_from([None, None, None, "a"]),
)


class Kept(NamedTuple):
    """A block in a tier."""

    key: bytes
    cells: list[Cell]


class KVMachine(RuleBasedStateMachine):
    """Each slot remembers its group and the sequence written up to it. A rule that computes is a whole step."""

    @initialize(
        num_tokens=st.integers(4, 90),
        block_size=st.sampled_from([1, 2, 2, 4]),
        caching=st.sampled_from([True, True, True, False]),
        windows=st.sampled_from(WINDOWS),
        ahead=st.sampled_from([2, 6, 40]),
        index=st.sampled_from(["hash", "radix"]),
        host=st.sampled_from([0, 5, 40]),
        swaps=st.booleans(),
        disk=st.sampled_from([0, 3, 60]),
    )
    def start(
        self,
        num_tokens: int,
        block_size: int,
        caching: bool,
        windows: list[int | None],
        ahead: int,
        index: str,
        host: int,
        swaps: bool,
        disk: int,
    ) -> None:
        num_blocks = 2 + num_tokens * len(windows) // block_size
        tiers = host_tier(host, swaps=swaps, disk=disk)
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            groups := kv_specs(windows),
            tiers,
            enable_prefix_caching=caching,
            prefix_index=index,
            ahead=ahead,
            pin_limits=PinLimits(num_blocks // 3 * caching, num_blocks),
            events=EventLog(groups),
        )
        self.told: set[tuple[int, int]] = set()  # the blocks that KV events speak of
        self.windows, self.groups, self.size, self.ahead = windows, groups, block_size, ahead
        self.contents: dict[int, list[Cell]] = {0: [()] * block_size}  # by block, then by offset
        self.kept: dict[tuple[str, int | bytes], Kept] = {}
        self.untold: list[bytes] = []  # stores on disk that have ended
        self.losing = 0  # loads to come that fail
        self.is_late = False
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # preempted
        self.num_requests = self.num_steps = 0
        for text in TEXTS * 2:  # what is there, and has partly been pushed out, before anything happens
            self.admit([(text, None)], 20, True)
            self.free(9, False)

    # ---- the model

    def first_seen(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def cell(self, request: Request, position: int, group: int) -> Cell:
        return (group, request.source.cache.salt, *request.token_ids[: position + 1])

    def finds_all(self, request: Request) -> bool:
        """All that the next token sees is there."""
        table, end = self.manager.block_ids(request), request.num_computed_tokens
        return all(
            self.contents[table[position // self.size * len(self.windows) + group]][position % self.size]
            == self.cell(request, position, group)
            for group in range(len(self.windows))
            for position in range(self.first_seen(group, end), end)
        )

    def move(self, step_id: int) -> dict[str, KVTierReport]:
        """What a worker does first."""
        failed: dict[str, list[tuple[bytes, int]]] = {"host": [], "disk": []}
        for move in self.manager.take_moves(step_id):
            place = (move.tier, move.slot if move.tier == "host" else move.key)
            if move.kind == "store":
                self.kept[place] = Kept(move.key, list(self.contents[move.block_id]))
                if move.tier == "disk":
                    self.untold.append(move.key)
            elif move.kind == "drop":
                self.kept.pop(place, None)
            elif self.losing:
                self.losing -= 1
                failed[move.tier].append((move.key, move.block_id))
                self.contents[move.block_id] = [()] * self.size
            else:
                assert self.kept[place].key == move.key
                self.contents[move.block_id] = list(self.kept[place].cells)
        reports = {tier: KVTierReport(failed=pairs) for tier, pairs in failed.items() if pairs}
        if step_id % 3 == 0 and self.untold:  # the writer of the disk is slower than steps
            reports["disk"] = KVTierReport(failed=failed["disk"], kept=self.untold)
            self.untold = []
        return reports

    def compute(self, request: Request, room: Room, count: int) -> None:
        """A step of one request: plan, moves, copies, what it reads is there, writes, result."""
        start, self.num_steps = request.num_computed_tokens, self.num_steps + 1
        table = self.manager.block_ids(request)
        rows = range(start // self.size, (start + count - 1) // self.size + 1)
        written = [table[row * len(self.windows) + group] for row in rows for group in range(len(self.windows))]
        assert all(self.manager.pool.blocks[i].ref_count == 1 for i in written), "a write into a shared block"
        if request.advance(count):
            request.num_placeholders -= 1
        self.manager.share(request)
        reports = self.move(self.num_steps)
        for source, destination in room.copies:
            self.contents[destination] = list(self.contents[source])
        request.num_computed_tokens = start
        is_sound = self.finds_all(request)
        request.num_computed_tokens = start + count
        for position in range(start, start + count):
            for group in range(len(self.windows)):
                block_id = table[position // self.size * len(self.windows) + group]
                cells = self.contents.setdefault(block_id, [()] * self.size)
                cells[position % self.size] = self.cell(request, position, group)
        plan = SchedulerOutput(step_id=self.num_steps, num_scheduled_tokens={request.request_id: count})
        result = ModelRunnerOutput(step_id=self.num_steps, kv_tiers=reports)
        misled = self.manager.spoil(self.manager.tiers.settle(plan, result, 1.0))
        assert not misled or any(report.failed for report in reports.values())
        for one in [one for one in self.running if one.request_id in misled]:
            self.preempt(one, swap=False)
        if request.request_id not in misled:
            assert is_sound
            request.confirm(start if self.is_late else start + count)

    def preempt(self, request: Request, *, swap: bool) -> None:
        if swap:
            self.manager.swap_out(request)
        self.manager.free(request)
        self.running.remove(request)
        request.preempt()
        self.waiting.append(request)

    def enter(self, request: Request, chunk: int) -> bool:
        """Admit a request, if there is room, and compute the first tokens that are not found."""
        prefix = self.manager.find_prefix(request)
        assert prefix.num_tokens < request.num_tokens
        if self.windows != [None] and self.manager.tiers.swaps.of(request) is None:
            self.check_longest(request, prefix)
        fits, num_free = self.manager.would_fit(request, []), self.manager.pool.num_free
        count = min(chunk, self.ahead // 2, request.num_tokens - prefix.num_tokens)
        room = self.manager.admit(request, prefix, count)
        assert fits == (room is not None)
        if room is None:
            assert self.manager.pool.num_free == num_free
            return False
        assert room.block_ids == self.manager.block_ids(request)
        request.start(prefix.num_tokens, 0.0, num_external=prefix.num_external)
        self.running.append(request)
        self.compute(request, room, count)
        return request in self.running

    def check_longest(self, request: Request, prefix: Prefix) -> None:
        """No longer prefix has all that its next token would see, in the pool or in tiers."""
        hashes = request.hashes(self.size)[: request.num_reusable_tokens // self.size]
        longest, can_load = 0, self.manager.tiers.chain.finder()
        if self.manager.enable_prefix_caching:
            for rows in range(1, len(hashes) + 1):
                seen = [
                    block_key(hashes[row], group)
                    for group in range(len(self.windows))
                    for row in range(self.first_seen(group, rows * self.size) // self.size, rows)
                ]
                if all(name in self.manager.index.names.blocks or can_load(name) for name in seen):
                    longest = rows * self.size
        assert prefix.num_tokens == longest
        local = prefix.blocks[: prefix.num_local // self.size * len(self.windows)]
        for row, group in (divmod(i, len(self.windows)) for i, block in enumerate(local) if block.block_id == 0):
            assert row < self.first_seen(group, longest) // self.size, "what is to be loaded counts as being there"

    # ---- what happens

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), chunk=st.sampled_from([1, 20]), whole=st.booleans())
    def admit(self, prompts: list[tuple[list[int], str | None]], chunk: int, whole: bool) -> None:
        for prompt, salt in prompts:
            name, self.num_requests = f"r{self.num_requests}", self.num_requests + 1
            request = Request(make_request(name, prompt, salt=salt), SOLO, limit=1000, queued_time=0.0)
            if self.enter(request, chunk) and whole:
                while request.num_computed_tokens < len(prompt) and self.extend(request, chunk, 0):
                    pass

    @rule(is_late=st.booleans())
    def confirm(self, is_late: bool) -> None:
        """All steps have come back; of those to come, the last one of each request has not."""
        self.is_late = is_late
        for request in self.running:
            request.confirm(request.num_computed_tokens)

    @rule(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=8), token_id=st.integers(0, 1))
    def go_on(self, chunks: list[int], token_id: int) -> None:
        """All that run, in turn."""
        for chunk in chunks:
            for request in list(self.running):
                if request in self.running:
                    self.extend(request, chunk, token_id)

    def extend(self, request: Request, chunk: int, token_id: int) -> bool:
        """The next tokens, if there is room, and what is loaded for them comes."""
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(token_id)
        count = min(chunk, self.ahead // 2, request.num_tokens - request.num_computed_tokens)
        before = self.manager.block_ids(request)
        room = self.manager.extend(request, count)
        after = self.manager.block_ids(request)
        kept = before[: len(before) - (room.num_replaced if room else 0)]
        assert all(now in (old, 0) for old, now in zip(kept, after, strict=False)), "only the null block replaces one"
        if room is None:
            assert len(after) == len(before)
            return False
        assert after[len(kept) :] == room.block_ids
        self.compute(request, room, count)
        return request in self.running

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def fork(self, data: st.DataObject, token_id: int) -> None:
        """A child of what is computed of the parent, followed by one more token, as after sampling."""
        parent = data.draw(st.sampled_from(self.running))
        parent.confirm(parent.num_computed_tokens)
        least = 1 if self.windows == [None] else parent.num_computed_tokens
        count, num_free = data.draw(st.integers(least, parent.num_computed_tokens)), self.manager.pool.num_free
        name, self.num_requests = f"r{self.num_requests}", self.num_requests + 1
        child = parent.fork(make_request(name, [0], salt=parent.source.cache.salt), SOLO, limit=1000)
        child.token_ids = [*parent.token_ids[:count], token_id]
        child.block_hashes = child.block_hashes[: count // self.size]
        self.manager.fork(parent, child, count)
        child.start(count, 0.0)
        self.running.append(child)
        assert self.manager.pool.num_free == num_free

    @rule(count=st.integers(1, 4), swap=st.sampled_from([True, True, False]))
    def give_way(self, count: int, swap: bool) -> None:
        for request in self.running[-count:]:
            if request.num_computed_tokens == request.num_tokens:
                request.token_ids.append(0)  # as sampled by the step that computed the last one
            self.preempt(request, swap=swap)

    @rule(count=st.integers(1, 4), chunk=st.integers(1, 20))
    def come_back(self, count: int, chunk: int) -> None:
        for request in self.waiting[-count:]:
            self.waiting.remove(request)
            if not self.enter(request, chunk) and request not in self.waiting:
                self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def can_gain(self, data: st.DataObject) -> None:
        """What it promises is what dropping the tables gives."""
        one = data.draw(st.sampled_from(self.running))
        chosen = [r for r in self.running if r is not one and data.draw(st.booleans())]
        kept = {b for r in self.running if r is not one and r not in chosen for b in self.manager.block_ids(r)}
        kept |= {block.block_id for block in self.manager.cache.pins.held}
        given = {b for r in chosen for b in self.manager.block_ids(r)} - {0}
        own = self.manager.block_ids(one)
        others = kept.union(*(self.manager.block_ids(r) for r in chosen))
        last = [b for b in own[-len(self.windows) :] if b in others and b != 0]
        unshared = bool(last) and all(b in given and b not in kept for b in last)
        assert self.manager.can_gain(one, chosen) == (bool(given.difference(own, kept)) or unshared)

    @rule(count=st.integers(1, 2), spoiled=st.sampled_from([False] * 7 + [True]))
    def free(self, count: int, spoiled: bool) -> None:
        for request in self.running[:count]:
            self.manager.free(request, spoiled=spoiled)
            self.running.remove(request)
            request.finish()

    @rule(count=st.integers(1, 2))
    def leave(self, count: int) -> None:
        for request in self.waiting[:count]:
            self.manager.tiers.swaps.drop(request.request_id)
            self.waiting.remove(request)

    @rule(prompt=PROMPTS, kind=st.sampled_from(["pin", "unpin", *["restore"] * 5, *["save"] * 2, "evict"]))
    def ask(self, prompt: tuple[list[int], str | None], kind: str) -> None:
        tokens, salt = prompt
        queries: dict[str, Query[Any]] = {
            "pin": SetPin(1000.0, prompt_token_ids=tokens, cache_salt=salt),
            "unpin": RemovePin(next((pin.pin_id for pin in self.manager.cache.pins.pins), "none")),
            "restore": RestorePrefix(tokens, cache_salt=salt),
            "save": SavePrefixes(),
            "evict": EvictPrefixes(),
        }
        reply_to(queries[kind], CoreState(self.manager, {}, [], time.monotonic))

    @rule(kind=st.sampled_from([*["loads fail"] * 6, "a step raises", "a step raises late", "reset"]))
    def trouble(self, kind: str) -> None:
        """A step raises, its moves made or not: what it would have reported is lost. Or loads to come fail, or ..."""
        if kind == "loads fail":
            self.losing += 1
        elif kind == "reset":
            self.manager.reset_prefix_cache()
        else:
            self.num_steps += 1
            if kind == "a step raises late":
                self.move(self.num_steps)
            else:
                self.manager.take_moves(self.num_steps)
            self.manager.tiers.void()

    # ---- what is true

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants(self.running)
        follow(self.told, self.manager)
        for request in self.running:
            assert self.finds_all(request)
            held = sum(block_id != 0 for block_id in self.manager.block_ids(request))
            assert held <= blocks_at_once(request.num_tokens, self.size, self.groups, self.ahead)

    def teardown(self) -> None:
        """When all is told, a disk holds what its planner knows."""
        if not hasattr(self, "manager"):
            return
        disk = self.manager.tiers.chain._by_name.get("disk")
        while self.untold or self.manager.tiers.chain.has_moves:
            self.num_steps += 1
            plan = SchedulerOutput(step_id=self.num_steps, num_scheduled_tokens={})
            result = ModelRunnerOutput(step_id=self.num_steps, kv_tiers=self.move(self.num_steps))
            self.manager.tiers.settle(plan, result, 1.0)
        if disk is not None:
            assert {key for (tier, key) in self.kept if tier == "disk"} == set(disk._kept)


TestKV = KVMachine.TestCase
TestKV.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
