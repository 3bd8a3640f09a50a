"""What the front end counts in one step. Plain numbers, in seconds and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.messages import FinishReason


@dataclass(slots=True)
class FinishedRequest:
    """One sequence that ended. Times are None for stages it never reached."""

    reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int | None
    num_preemptions: int
    e2e_seconds: float
    queue_seconds: float | None = None  # queued to scheduled
    prefill_seconds: float | None = None  # scheduled to first token
    decode_seconds: float | None = None  # first token to last
    inference_seconds: float | None = None  # scheduled to last token
    seconds_per_output_token: float | None = None  # mean, without the first
    num_computed_prompt_tokens: int | None = None  # without cached ones; 0 if a sibling did it; None if unfinished
    n: int | None = None  # samples asked for; only on the sequence that ends its request
    max_num_generation_tokens: int | None = None  # of all its samples; as for n


@dataclass(slots=True)
class IterationStats:
    """One message from the core, as the front end saw it."""

    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0  # of sequences whose first token came in this step
    num_cached_tokens: int = 0  # the part of them that caches supplied,
    num_external_tokens: int = 0  # and of this, KV tiers behind the block pool
    first_token_seconds: list[float] = field(default_factory=list)  # arrival to first token
    inter_token_seconds: list[float] = field(default_factory=list)
    tenant_tokens: dict[str, tuple[int, int]] = field(default_factory=dict)  # of prompts, of answers
    finished: list[FinishedRequest] = field(default_factory=list)

    def count_tenant(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """Tokens computed for a tenant."""
        prompts, outputs = self.tenant_tokens.get(name, (0, 0))
        self.tenant_tokens[name] = prompts + prompt_tokens, outputs + output_tokens
