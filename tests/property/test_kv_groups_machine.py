"""Tables by group: a request finds all that its next token sees, and no block is lost, whatever is forked or freed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from octavo.core.family import SOLO
from octavo.core.kv_cache.groups import GroupedKVCacheManager
from octavo.core.kv_cache.manager import Room
from octavo.core.request import Request
from tests.core.checking_worker import make_request

Cell = tuple[object, ...]


class GroupsMachine(RuleBasedStateMachine):
    """Each slot remembers its group and the sequence written up to it."""

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(2, 30),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        windows=st.lists(st.sampled_from([None, 1, 2, 3, 6]), min_size=1, max_size=3),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, windows: list[int | None]) -> None:
        self.manager = GroupedKVCacheManager(num_blocks, block_size, windows, enable_prefix_caching=caching)
        self.windows, self.size = windows, block_size
        self.contents: dict[int, list[Cell]] = {}  # by block, then by offset
        self.running: list[Request] = []
        self.count = 0

    def first_seen(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def cell(self, request: Request, position: int, group: int) -> Cell:
        return (group, request.source.cache_salt, *request.token_ids[: position + 1])

    def check(self, request: Request) -> None:
        """All that the next token sees is there."""
        table, end = self.manager.block_ids(request), request.num_computed_tokens
        for group in range(len(self.windows)):
            for position in range(self.first_seen(group, end), end):
                block_id = table[position // self.size * len(self.windows) + group]
                assert block_id != 0, f"position {position} of group {group} is gone"
                assert self.contents[block_id][position % self.size] == self.cell(request, position, group)

    def advance(self, request: Request, count: int) -> None:
        """A step: what it reads is there; then its slots are written, and its blocks offered to others."""
        self.check(request)
        start, table = request.num_computed_tokens, self.manager.block_ids(request)
        if request.advance(count):
            request.num_placeholders -= 1
        for position in range(start, start + count):
            for group in range(len(self.windows)):
                block_id = table[position // self.size * len(self.windows) + group]
                assert self.manager.pool.blocks[block_id].ref_count == 1, "a write into a shared block"
                self.contents.setdefault(block_id, [()] * self.size)[position % self.size] = self.cell(
                    request, position, group
                )
        self.manager.share(request)

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from([None, None, "a"]),
        chunk=st.integers(1, 20),
    )
    def admit(self, prompt: list[int], salt: str | None, chunk: int) -> object:
        request = Request(make_request(f"r{self.count}", prompt, salt=salt), SOLO, limit=1000, queued_time=0.0)
        self.count += 1
        prefix = self.manager.find_prefix(request)
        assert prefix.num_tokens < len(prompt)
        assert prefix.num_tokens % self.size == 0
        self.check_longest(request, prefix.num_tokens)
        fits, num_free = self.manager.would_fit(request, []), self.manager.pool.num_free
        count = min(chunk, len(prompt) - prefix.num_tokens)
        room = self.manager.admit(request, prefix, count)
        assert fits == (room is not None)
        if room is None:
            assert self.manager.pool.num_free == num_free
            return multiple()
        assert room.block_ids == self.manager.block_ids(request)
        request.start(prefix.num_tokens, 0.0)
        self.running.append(request)
        self.advance(request, count)
        return request

    def check_longest(self, request: Request, num_tokens: int) -> None:
        """No longer prefix has all that its next token would see, by the names in the index."""
        hashes = request.hashes(self.size)[: request.num_reusable_tokens // self.size]
        longest = 0
        if self.manager.enable_prefix_caching:
            for rows in range(1, len(hashes) + 1):
                seen = [
                    (row, group)
                    for group in range(len(self.windows))
                    for row in range(self.first_seen(group, rows * self.size) // self.size, rows)
                ]
                names = [hashes[row] + group.to_bytes(4) for row, group in seen]
                if all(self.manager.index.get(name) is not None for name in names):
                    longest = rows * self.size
        assert num_tokens == longest

    @rule(request=requests)
    def confirm(self, request: Request) -> None:
        request.num_confirmed_tokens = request.num_computed_tokens

    @rule(request=requests, chunk=st.integers(1, 9), token_id=st.integers(0, 1))
    def extend(self, request: Request, chunk: int, token_id: int) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(token_id)
        count = min(chunk, request.num_tokens - request.num_computed_tokens)
        before = self.manager.block_ids(request)
        room = self.manager.extend(request, count)
        after = self.manager.block_ids(request)
        kept = before[: len(before) - (room.num_replaced if room else 0)]
        assert all(now in (old, 0) for old, now in zip(kept, after, strict=False)), "only the null block replaces one"
        if room is None:
            assert len(after) == len(before)
            return
        assert after[len(kept) :] == room.block_ids
        self.copy(room)
        self.advance(request, count)

    def copy(self, room: Room) -> None:
        for source, destination in room.copies:
            self.contents[destination] = list(self.contents[source])

    @rule(target=requests, parent=requests, token_id=st.integers(0, 1))
    def fork(self, parent: Request, token_id: int) -> Request:
        """A child of all that is computed of the parent, followed by one more token, as after sampling."""
        count, num_free = parent.num_computed_tokens, self.manager.pool.num_free
        child = parent.fork(make_request(f"r{self.count}", [0], salt=parent.source.cache_salt), SOLO, limit=1000)
        self.count += 1
        child.token_ids = [*parent.token_ids[:count], token_id]
        child.block_hashes = child.block_hashes[: count // self.size]
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
        kept = {b for r in self.running if r is not one and r not in chosen for b in self.manager.block_ids(r)}
        given = {b for r in chosen for b in self.manager.block_ids(r)} - {0}
        own = self.manager.block_ids(one)
        others = {b for r in self.running if r is not one for b in self.manager.block_ids(r)}
        last = [b for b in own[-len(self.windows) :] if b in others and b != 0]
        unshared = bool(last) and all(b in given and b not in kept for b in last)
        assert self.manager.can_gain(one, chosen) == (bool(given.difference(own, kept)) or unshared)

    @rule(request=consumes(requests), spoiled=st.booleans())
    def free(self, request: Request, spoiled: bool) -> None:
        self.manager.free(request, spoiled=spoiled)
        self.running.remove(request)
        request.finish()

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants(self.running)
        for request in self.running:
            self.check(request)


TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
