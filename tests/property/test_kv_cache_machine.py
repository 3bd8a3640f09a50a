"""BlockPool and KVCacheManager against plain models: sets, lists and the contents written to each block."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.block_pool import BlockPool
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.prefix_index import PrefixIndex
from octavo.core.request import Request
from tests.core.checking_worker import make_request


class PoolMachine(RuleBasedStateMachine):
    """The free list is modelled as a Python list, in the order in which blocks must be taken."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, PrefixIndex())
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
        blocks = [block for table in self.held for block in table if block.block_hash is None]
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.num_names += 1
            self.names[block.block_id] = b"%d" % self.num_names
            self.pool.index.insert(self.names[block.block_id], block)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.names.values())), unique=True)) if self.names else []
        blocks = [block for name in names if (block := self.pool.index.get(name)) is not None]
        assert len(blocks) == len(names)
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
        assert {b.block_id: b.block_hash for b in self.pool.blocks if b.block_hash is not None} == self.names


class ManagerMachine(RuleBasedStateMachine):
    """Each block remembers the sequence written into it; a prefix found must hold exactly the request's own."""

    requests = Bundle("requests")

    @initialize(num_blocks=st.integers(2, 14), block_size=st.sampled_from([1, 2, 4]), caching=st.booleans())
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.caching = caching
        self.contents: dict[int, tuple[object, ...]] = {}
        self.running: list[Request] = []
        self.count = 0

    def write(self, request: Request) -> None:
        """Blocks now hold the salt and all tokens up to their own end."""
        table = self.manager.block_ids(request)
        size = self.manager.block_size
        for i in range(-(-request.num_computed_tokens // size)):
            end = min((i + 1) * size, request.num_computed_tokens)
            self.contents[table[i]] = (request.source.cache_salt, *request.token_ids[:end])

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from([None, "a"]),
        chunk=st.integers(1, 14),
    )
    def admit(self, prompt: list[int], salt: str | None, chunk: int) -> object:
        request = Request(make_request(f"r{self.count}", prompt, salt=salt), limit=1000, queued_time=0.0)
        self.count += 1
        prefix = self.manager.find_prefix(request)
        size = self.manager.block_size
        cached = len(prefix) * size
        assert cached < len(prompt)
        assert self.caching or not prefix
        for i, block in enumerate(prefix):
            assert self.contents[block.block_id] == (salt, *prompt[: (i + 1) * size])
        num_free = self.manager.pool.num_free
        if self.manager.admit(request, prefix, min(chunk, len(prompt) - cached)) is None:
            assert self.manager.pool.num_free == num_free
            return multiple()
        request.start(cached, 0.0)
        self.running.append(request)
        self.advance(request, min(chunk, len(prompt) - cached))
        return request

    def advance(self, request: Request, count: int) -> None:
        if request.advance(count):
            request.num_placeholders -= 1
        self.write(request)
        self.manager.share(request)
        request.num_confirmed_tokens = request.num_computed_tokens

    @rule(request=requests, chunk=st.integers(1, 6), token_id=st.integers(0, 1))
    def extend(self, request: Request, chunk: int, token_id: int) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(token_id)
        count = min(chunk, request.num_tokens - request.num_computed_tokens)
        if self.manager.extend(request, count) is not None:
            self.advance(request, count)

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
            size, table = self.manager.block_size, self.manager.block_ids(request)
            for i in range(request.num_computed_tokens // size):
                expected = (request.source.cache_salt, *request.token_ids[: (i + 1) * size])
                assert self.contents[table[i]] == expected, "a running request's block was overwritten"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
