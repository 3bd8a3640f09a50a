"""What an engine's memory is for, part by part, before any of it is taken."""

from __future__ import annotations

import msgspec

from octavo.messages.kv_cache import KVCacheSpec
from octavo.utils.units import format_bytes

PARTS = ("weights", "activations", "sampling", "requests", "queue", "tiers", "processes")  # beside KV blocks


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, but for ``num_blocks`` (the null block included) and ``max_model_len`` (tokens).

    ``memory`` is what there is for octavo. ``refusal`` says why an engine of these sizes does not start; empty if it
    does.
    """

    memory: int
    weights: int  # packed
    activations: int  # buffers of the largest step
    sampling: int  # rows of logits that requests change, masks, logprobs, scratch memory
    requests: int  # token ids and block tables of those that run
    queue: int  # prompts of those that wait
    tiers: int  # KV blocks that the pool has no room for
    processes: int  # interpreters, libraries and tokenizer of the front end, the engine core and the grammar checker
    packing: int  # beside weights and processes, before the rest is used; nothing with packed weights in the cache
    block_bytes: int  # from a KV block to the next: a little more than its tokens take
    book_bytes: int  # what the scheduler knows of a block and its tokens
    kv: KVCacheSpec
    num_blocks: int
    max_model_len: int
    refusal: str = ""

    @property
    def kv_bytes(self) -> int:
        """Of all blocks, and what is known of them."""
        return self.num_blocks * (self.block_bytes + self.book_bytes)

    @property
    def fixed(self) -> int:
        """All but KV blocks."""
        return sum(getattr(self, name) for name in PARTS)

    @property
    def total(self) -> int:
        """When all is in use."""
        return self.fixed + self.kv_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold, if none is given back."""
        return max(0, self.num_blocks - 1) // len(self.kv.groups) * self.kv.block_size

    @property
    def explained(self) -> str:
        """The total and its parts, in words."""
        sizes = {"KV cache": self.kv_bytes} | {name: getattr(self, name) for name in PARTS}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
        return f"{format_bytes(self.total)} are needed ({parts})"

    def requests_of(self, num_tokens: int) -> int:
        """How many requests of ``num_tokens`` run side by side without sharing anything.

        The last one is let in when there is room for all it will hold; those before it hold what their windows see.
        """
        if num_tokens > self.max_model_len:
            return 0
        left = self.num_blocks - 1 - self.kv.blocks_for(num_tokens)
        return 0 if left < 0 else 1 + left // self.kv.blocks_held(num_tokens)
