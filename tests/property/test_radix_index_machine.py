"""RadixIndex against a flat model: a dictionary of all prefixes, searched from end to end."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.names import CacheEntry
from octavo.core.kv_cache.prefix_index import make_index
from octavo.core.kv_cache.radix_index import RadixIndex, RadixNode
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from tests.core.checking_worker import make_request

Prefix = tuple[str | None, tuple[int, ...]]  # salt, all tokens up to a block's end

token_ids = st.sampled_from([0, 1, 256, 2**31 - 1])
sequences = st.lists(token_ids, max_size=12) | st.lists(st.sampled_from([0, 1]), max_size=20)
salts = st.sampled_from([None, "a"])


class Listener:
    """A CacheObserver that remembers what it heard, and distrusts it."""

    def __init__(self) -> None:
        self.known: dict[bytes, Block] = {}

    def named(self, entry: CacheEntry) -> None:
        assert entry.key
        assert entry.key not in self.known
        assert entry.block.entry is entry, "heard before it is so"
        self.known[entry.key] = entry.block

    def unnamed(self, entry: CacheEntry) -> None:
        assert self.known.pop(entry.key) is entry.block
        assert entry.block.entry is None, "heard before it is so"

    def cleared(self) -> None:
        assert not any(block.is_cached for block in self.known.values()), "heard before it is so"
        self.known.clear()


class RadixMachine(RuleBasedStateMachine):
    @initialize(block_size=st.sampled_from([1, 2, 4]))
    def start(self, block_size: int) -> None:
        self.size = block_size
        self.index = make_index("radix", block_size, 1, lambda: 0.0)
        assert isinstance(self.index, RadixIndex)
        self.listener = Listener()
        self.index.names.observers = [self.listener]
        self.blocks: dict[Prefix, Block] = {}
        self.count = 0

    def request(self, salt: str | None, tokens: list[int]) -> Request:
        return Request(make_request("r", tokens, salt=salt), SOLO, limit=1000, queued_time=0.0)

    def row_start(self, tokens: tuple[int, ...]) -> int:
        """Where the last block of a sequence begins."""
        return (len(tokens) - 1) // self.size * self.size

    def continuations(self, salt: str | None, start: tuple[int, ...]) -> Iterator[Prefix]:
        """Known prefixes with exactly one block behind ``start``."""
        for key in self.blocks:
            if key[0] == salt and self.row_start(key[1]) == len(start) and key[1][: len(start)] == start:
                yield key

    @rule(salt=salts, tokens=sequences)
    def insert(self, salt: str | None, tokens: list[int]) -> None:
        blocks = [Block(self.count + i) for i in range(-(-len(tokens) // self.size))]
        self.count += len(blocks)
        superseded: list[Block] = []
        for i, block in enumerate(blocks):
            whole = tuple(tokens[: (i + 1) * self.size])
            near = list(self.continuations(salt, whole[: i * self.size]))
            if any(key[1][: len(whole)] == whole for key in near):
                continue  # this, or a longer one, is there
            superseded += [self.blocks.pop(key) for key in near if whole[: len(key[1])] == key[1]]
            self.blocks[salt, whole] = block
        self.index.insert(self.request(salt, tokens), blocks, len(tokens))
        assert not any(block.is_cached for block in superseded)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if not self.blocks:
            return
        salt, tokens = data.draw(st.sampled_from(sorted(self.blocks, key=repr)))
        self.index.remove(self.blocks[salt, tokens])
        for key in [key for key in self.blocks if key[0] == salt and key[1][: len(tokens)] == tokens]:
            assert not self.blocks.pop(key).is_cached

    @rule(salt=salts, tokens=sequences, data=st.data())
    def match(self, salt: str | None, tokens: list[int], data: st.DataObject) -> None:
        if self.blocks and data.draw(st.booleans()):  # one that is known, and goes on
            salt, known = data.draw(st.sampled_from(sorted(self.blocks, key=repr)))
            tokens = [*known, *tokens]
        request = self.request(salt, tokens)
        num_tokens = data.draw(st.integers(0, len(tokens)))
        blocks, source, num_shared = self.index.match(request, num_tokens)
        found = []
        while (len(found) + 1) * self.size <= num_tokens:
            block = self.blocks.get((salt, tuple(tokens[: (len(found) + 1) * self.size])))
            if block is None:
                break
            found.append(block)
        assert list(blocks) == found
        fresh = self.request(salt, tokens).hashes(self.size)
        assert request.block_hashes == fresh[: len(found)] == [block.key for block in found]
        begin = len(found) * self.size
        rest = tokens[begin:num_tokens]
        shared = {
            self.blocks[key]: common(key[1][begin:], rest) for key in self.continuations(salt, tuple(tokens[:begin]))
        }
        assert num_shared == max(shared.values(), default=0)
        assert (source is None) == (num_shared == 0)
        if source is not None:
            assert shared[source] == num_shared

    @rule()
    def clear(self) -> None:
        self.index.clear()
        assert not any(block.is_cached for block in self.blocks.values())
        self.blocks.clear()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "index"):
            return
        assert len(self.index) == len(self.blocks)
        assert self.listener.known == self.index.names.blocks
        full = {block.key for (_, tokens), block in self.blocks.items() if len(tokens) % self.size == 0}
        assert set(self.index.names.blocks) == full
        assert all(block in self.index for block in self.blocks.values())
        for root in self.index._roots.values():
            assert root.keys, "a namespace without blocks"
            self.check(root)

    def check(self, node: RadixNode) -> None:
        width = 4 * self.size
        assert node.keys == sorted(node.keys) == [child.label[:width] for child in node.children]
        assert not any(later.startswith(key) for key, later in zip(node.keys, node.keys[1:]))
        for child in node.children:
            assert child.parent is node
            assert len(child.blocks) == -(-len(child.label) // width) > 0
            assert all(block.entry is not None and block.entry.node is child for block in child.blocks)
            partly = len(child.label) % width != 0
            assert not partly or (len(child.blocks) == 1 and not child.children)
            assert [block.key is None for block in child.blocks] == [partly] * len(child.blocks)
            self.check(child)


def common(one: tuple[int, ...], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
