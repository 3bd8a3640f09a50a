"""Configuration of speculation: the object of ``--speculative-config``, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.choices import DRAFTERS
from octavo.config.option import MAX_TOKENS, one_of, require

MAX_SPECULATIVE_TOKENS = 64
DEFAULT_LOOKUP, MAX_LOOKUP = 5, 64  # tokens of an n-gram


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What proposes tokens ahead of the model.

    ``ngram`` proposes what followed the last tokens where they came before: the longest run of
    ``prompt_lookup_min..prompt_lookup_max`` of them that did. One without the other is both; without any, both are 5.
    """

    method: str  # one of DRAFTERS
    num_speculative_tokens: int  # most tokens ahead
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    disable_by_batch_size: int = 2  # nothing is tried in a step of more requests than this

    def __post_init__(self) -> None:
        one_of("method", self.method, DRAFTERS)
        count, most = self.num_speculative_tokens, MAX_SPECULATIVE_TOKENS
        require(1 <= count <= most, "num_speculative_tokens", count, f"1..{most}")
        shortest, longest = self.lookup
        require(1 <= longest <= MAX_LOOKUP, "prompt_lookup_max", longest, f"1..{MAX_LOOKUP}")
        require(1 <= shortest <= longest, "prompt_lookup_min", shortest, f"1..{longest} (prompt_lookup_max)")
        size = self.disable_by_batch_size
        require(1 <= size <= MAX_TOKENS, "disable_by_batch_size", size, f"1..{MAX_TOKENS}")

    @property
    def lookup(self) -> tuple[int, int]:
        """``prompt_lookup_min`` and ``prompt_lookup_max``, filled in."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = DEFAULT_LOOKUP if longest is None else longest
        return shortest, shortest if longest is None else longest
