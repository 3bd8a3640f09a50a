"""RadixIndex: trees of token ids, one for each namespace. Finds prefixes token by token.

    root ── [b7 b3 b9] ─┬─ [b4 b2]      an edge is a run of blocks; it is cut in two where sequences part
                        ├─ [b8]         children may begin alike, for blocks cannot be cut
                        └─ [b5.]        a partly filled block is a leaf of its own

A label is the edge's token ids, four bytes each. The children of a node are sorted by the labels of their first blocks
(their keys), so that bisection finds the child that begins most like a given sequence: it is a neighbour of the place
where the sequence belongs. No child's key begins with the whole of another's. A block is in the tree only while all
before it are.

After SGLang's RadixAttention (Zheng et al., arXiv 2312.07104), whose tree leads to places of tokens instead of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.hashing import Extra
from octavo.core.kv_cache.names import CacheEntry, Names
from octavo.core.kv_cache.prefix_index import Match
from octavo.core.request import Request

ID_BYTES = 4  # of a token id in Request.packed()


class RadixNode:
    """A node and the edge that leads to it. A root has neither edge nor parent, but a namespace."""

    __slots__ = ("blocks", "children", "keys", "label", "namespace", "parent")

    def __init__(self, parent: RadixNode | None, namespace: Sequence[Extra] = ()) -> None:
        self.parent = parent
        self.namespace = namespace
        self.label = b""
        self.blocks: list[Block] = []
        self.keys: list[bytes] = []  # sorted
        self.children: list[RadixNode] = []  # in the order of their keys

    def extend(self, label: bytes, blocks: Sequence[Block]) -> None:
        """Make the edge longer by ``blocks``, whose entries have yet to say so."""
        self.label += label
        self.blocks += blocks

    def add_child(self, place: int, key: bytes) -> RadixNode:
        """Add a child, whose edge the caller fills; ``place`` is where ``key`` belongs among the keys."""
        child = RadixNode(self)
        self.keys.insert(place, key)
        self.children.insert(place, child)
        return child

    def drop_child(self, place: int) -> None:
        del self.keys[place], self.children[place]


class RadixIndex:
    """A PrefixIndex. A search takes time by the bytes of the sequence, compared in bulk, and the edges passed."""

    __slots__ = ("_block_size", "_length", "_roots", "_width", "names")

    def __init__(self, names: Names, block_size: int, num_groups: int = 1) -> None:
        assert num_groups == 1, "a tree of tokens has one KV group"
        self.names, self._block_size = names, block_size
        self._width = ID_BYTES * block_size
        self._roots: dict[Sequence[Extra], RadixNode] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: Block) -> bool:
        node = block.entry.node if block.entry is not None else None
        return node is not None and block in node.blocks

    def match(self, request: Request, num_tokens: int) -> Match:
        """See ``PrefixIndex.match``. The request remembers the hashes of the blocks found, without computing them."""
        node = self._roots.get(request.namespace)
        if node is None:
            return Match()
        match = self._walk(node, request.packed(), ID_BYTES * num_tokens)
        known = request.block_hashes
        known += [block.entry.key for block in match.blocks[len(known) :] if block.entry is not None]
        return match

    def _walk(self, node: RadixNode, text: bytearray, end: int) -> Match:
        """The longest prefix of ``text[:end]`` below a root."""
        width, at = self._width, 0
        found: list[Block] = []
        while at < end:
            piece = bytes(text[at : min(at + width, end)])
            place = bisect_left(node.keys, piece)
            if len(piece) < width or place == len(node.keys) or node.keys[place] != piece:
                return Match(found, *_nearest(node, place, piece))
            node = node.children[place]
            shared = _common(node.label, text, at, end)
            found += node.blocks[: shared // width]
            if shared < len(node.label):
                rest = shared % width // ID_BYTES
                return Match(found, node.blocks[shared // width], rest) if rest else Match(found)
            at += shared
        return Match(found)

    def insert(self, request: Request, blocks: Sequence[Block], num_tokens: int, *, first: int = 0) -> None:
        """See ``PrefixIndex.insert``. Blocks before ``first`` that are gone are found again."""
        if num_tokens == 0:
            return
        text, width, end = request.packed(), self._width, ID_BYTES * num_tokens
        node = self._roots.setdefault(request.namespace, RadixNode(None, request.namespace))
        at = 0
        while at < end:
            piece = bytes(text[at : min(at + width, end)])
            place = bisect_left(node.keys, piece)
            if place == len(node.keys) or not node.keys[place].startswith(piece):
                self._grow(node, place, request, blocks, at, end)
                break
            child = node.children[place]
            shared = _common(child.label, text, at, end)
            if at + shared == end:
                break
            whole = shared // width
            node = child if whole == len(child.blocks) else self._split(child, whole)
            at += whole * width

    def _grow(
        self, node: RadixNode, place: int, request: Request, blocks: Sequence[Block], start: int, end: int
    ) -> None:
        """Add the blocks of the request's tokens from byte ``start`` to ``end`` below ``node``, as its child ``place``.

        No child of ``node`` begins with all tokens of the first of these blocks.
        """
        width, text = self._width, bytes(request.packed()[start:end])
        if place > 0 and text.startswith(node.keys[place - 1]):  # a partly filled one with the same tokens, and no more
            place -= 1
            self._unlink(node.children[place].blocks)
            node.drop_child(place)
        row, num_full = start // width, len(text) // width
        cut = num_full * width
        self._length += -(-len(text) // width)
        if num_full > 0:
            if node.parent is None or node.keys:
                node = node.add_child(place, text[:width])
            node.extend(text[:cut], blocks[row : row + num_full])
            place = 0
        if cut < len(text):
            block = blocks[row + num_full]
            leaf = node.add_child(place, text[cut:])
            leaf.extend(text[cut:], [block])
            block.entry = CacheEntry(b"", block)
            block.entry.node = leaf
        hashes = request.hashes(self._block_size)
        for i in range(row, row + num_full):
            self.names.add(hashes[i], blocks[i], request, i).node = node

    def _split(self, node: RadixNode, count: int) -> RadixNode:
        """Cut the edge to ``node`` after ``count`` blocks. Returns the upper part, which is a new node."""
        assert node.parent is not None
        cut = count * self._width
        upper = RadixNode(node.parent)
        upper.extend(node.label[:cut], node.blocks[:count])
        for block in upper.blocks:
            assert block.entry is not None
            block.entry.node = upper
        node.parent.children[bisect_left(node.parent.keys, node.label[: self._width])] = upper
        node.parent, node.label, node.blocks = upper, node.label[cut:], node.blocks[count:]
        upper.keys, upper.children = [node.label[: self._width]], [node]
        return upper

    def remove(self, block: Block) -> None:
        """See ``PrefixIndex.remove``: those that continue ``block`` too."""
        node = block.entry.node if block.entry is not None else None
        if node is None:
            return
        count = len(node.blocks) - 1  # that go before it; it is the last one when it is evicted
        if node.blocks[count] is not block:
            count = node.blocks.index(block)
        dropped = node.blocks[count:]
        if node.children:
            dropped += _blocks_below(node)
            node.keys, node.children = [], []
        if count > 0:
            node.label = node.label[: count * self._width]
            del node.blocks[count:]
        else:
            self._detach(node)
        self._unlink(dropped)

    def _detach(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        parent.drop_child(bisect_left(parent.keys, node.label[: self._width]))
        if parent.parent is None and not parent.keys:
            del self._roots[parent.namespace]

    def _unlink(self, blocks: Sequence[Block]) -> None:
        """Drop the entries of ``blocks``, which are no longer in the tree."""
        self._length -= len(blocks)
        for block in blocks:
            entry = block.entry
            assert entry is not None
            if entry.key:
                self.names.drop(entry)
            else:
                block.entry = None

    def clear(self) -> None:
        """See ``PrefixIndex.clear``."""
        for root in self._roots.values():
            for block in _blocks_below(root):
                block.entry = None
        self._roots.clear()
        self._length = 0
        self.names.clear()


def _blocks_below(node: RadixNode) -> Iterator[Block]:
    waiting = list(node.children)
    while waiting:
        child = waiting.pop()
        yield from child.blocks
        waiting += child.children


def _nearest(node: RadixNode, place: int, piece: bytes) -> tuple[Block | None, int]:
    """The first block of the child of ``node`` that begins most like ``piece``, which belongs there; tokens shared."""
    best, most = None, 0
    for i in range(max(place - 1, 0), min(place + 1, len(node.keys))):
        shared = _common(node.keys[i], piece, 0, len(piece)) // ID_BYTES
        if shared > most:
            best, most = node.children[i].blocks[0], shared
    return best, most


def _common(label: bytes, text: bytes | bytearray, start: int, end: int) -> int:
    """How many leading bytes ``label`` has in common with ``text[start:end]``."""
    if text.startswith(label, start, end):
        return len(label)
    other = text[start : min(start + len(label), end)]
    differences = int.from_bytes(label[: len(other)], "big") ^ int.from_bytes(other, "big")
    return len(other) - (differences.bit_length() + 7) // 8
