"""The waiting room: what has been taken in and has not begun to run, and the door that closes when it is full.

    enter() ──▶ Place ──▶ the core has started it, or it has ended ──▶ leave()
       └── OverloadedError: too many sequences, or tokens of prompts, wait already; nothing of the request is taken in

All prompts and samples of one call count together, so a request never gets in by half. A request that
comes to an empty room is let in, however large. A tenant's own limits come on top (``engine.tenants``). Knows nothing
of cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.config import QueueConfig
from octavo.engine.tenants import Tenants
from octavo.exceptions import OverloadedError
from octavo.messages import SamplingParams
from octavo.metrics.service_rate import ServiceRate

MAX_RETRY_SECONDS = 600.0  # no client is told to stay away longer: the estimate is no better


class Load(NamedTuple):
    """One prompt with its samples or beams: what it would add to the room. ``max_output`` is over all of them."""

    num_seqs: int
    num_tokens: int  # of the prompt, which is computed once
    max_output: int
    tenant: str = ""

    @classmethod
    def of(cls, num_tokens: int, params: SamplingParams, max_model_len: int, tenant: str) -> Load:
        """What a prompt of ``num_tokens`` asks for. Of a beam search all beams run, however few are wanted."""
        beams = params.beam_search
        num_seqs = params.n if beams is None else beams.beam_width
        longest = max_model_len - num_tokens if params.max_tokens is None else params.max_tokens
        return cls(num_seqs, num_tokens, num_seqs * longest, tenant)


class Place:
    """One prompt's place in the room, until it leaves or is forgotten."""

    __slots__ = ("_left", "_room", "load")

    def __init__(self, room: WaitingRoom, load: Load) -> None:
        self._room, self.load, self._left = room, load, False

    @property
    def waits(self) -> bool:
        return not self._left

    def leave(self) -> None:
        """Idempotent."""
        if not self._left:
            self._left = True
            self._room._add(self.load, -1)

    __del__ = leave  # a stream that was never read


class WaitingRoom:
    """``num_running``: sequences in the core's batch, kept right by the owner; free seats are no waiting."""

    def __init__(
        self,
        config: QueueConfig,
        max_num_seqs: int,
        rate: ServiceRate,
        tenants: Tenants,
        on_refusal: Callable[[str], None],
    ) -> None:
        """``on_refusal`` hears the name of each limit that refuses a request."""
        default = 16 * max_num_seqs
        limit = default if config.max_num_queued_reqs is None else config.max_num_queued_reqs
        self._max_seqs = limit or math.inf
        self._max_tokens = config.max_num_queued_tokens or math.inf
        self._seats, self._rate, self._tenants, self._on_refusal = max_num_seqs, rate, tenants, on_refusal
        self.num_running = 0
        self.num_seqs = self.num_tokens = self._max_output = 0

    def _add(self, load: Load, sign: int) -> None:
        self.num_seqs += sign * load.num_seqs
        self.num_tokens += sign * load.num_tokens
        self._max_output += sign * load.max_output
        self._tenants.queue(load.tenant, sign * load.num_seqs)

    def check(self, tenant: str = "") -> None:
        """Raises OverloadedError if not even the smallest request of ``tenant`` would be let in."""
        self._check(1, 1, tenant)

    def enter(self, loads: Sequence[Load], timeout: float | None = None) -> list[Place]:
        """A place for each prompt of a request, which has one tenant. Raises OverloadedError if not all may enter.

        Nor may they if the room will take longer than ``timeout`` seconds, as far as that can be foreseen.
        """
        tenant, num_tokens = loads[0].tenant, sum(load.num_tokens for load in loads)
        self._check(sum(load.num_seqs for load in loads), num_tokens, tenant)
        wait = self.wait_seconds()
        if timeout is not None and wait is not None and wait > timeout and self.num_seqs:
            raise self._hopeless(wait, timeout)
        self._tenants.use(tenant, num_tokens)
        places = []
        for load in loads:
            self._add(load, 1)
            places.append(Place(self, load))
        return places

    def _check(self, num_seqs: int, num_tokens: int, tenant: str) -> None:
        try:
            self._tenants.check(tenant, num_seqs)
        except OverloadedError as error:
            self._on_refusal(error.reason)
            raise
        if self.num_seqs == 0:
            return
        free = max(0, self._seats - self.num_running)
        seqs_over = self.num_seqs + num_seqs - free - self._max_seqs
        if seqs_over > 0:
            raise self._refusal("max_num_queued_reqs", self._max_seqs, seqs_over / self.num_seqs)
        tokens_over = self.num_tokens + num_tokens - self._max_tokens
        if tokens_over > 0:
            raise self._refusal("max_num_queued_tokens", self._max_tokens, tokens_over / max(1, self.num_tokens))

    def wait_seconds(self) -> float | None:
        """When the last of the room will have run, at the measured rate; None before anything was measured."""
        outputs: float = self._max_output
        if self._rate.mean_output is not None:
            outputs = min(outputs, self.num_seqs * self._rate.mean_output)
        return self._rate.seconds_for(self.num_tokens, outputs)

    def _hopeless(self, wait: float, timeout: float) -> OverloadedError:
        self._on_refusal("timeout")
        message = (
            f"what waits takes about {wait:.0f} s at the measured rate, and the request's timeout is {timeout:g} s"
        )
        return OverloadedError(message, reason="timeout", retry_after=min(wait - timeout, MAX_RETRY_SECONDS))

    def _refusal(self, reason: str, limit: float, share: float) -> OverloadedError:
        """``share`` of the room must have left before the request fits."""
        self._on_refusal(reason)
        message = (
            f"too much is waiting: {self.num_seqs} sequences with {self.num_tokens} prompt tokens, "
            f"and --{reason.replace('_', '-')} is {limit:.0f}"
        )
        wait, retry = self.wait_seconds(), None
        if wait is not None:
            retry = min(max(1.0, wait * min(1.0, share)), MAX_RETRY_SECONDS)
            prompts, outputs = self._rate.prompt_tokens_per_second, self._rate.output_tokens_per_second
            message += (
                f"; at the measured {prompts:.0f} prompt and {outputs:.0f} output tokens per second they take about "
                f"{wait:.0f} s, and there may be room in {math.ceil(retry)} s"
            )
        return OverloadedError(message, reason=reason, retry_after=retry)
