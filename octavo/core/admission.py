"""What a request must satisfy to run.

LengthLimits are checked once, when a request is added. An AdmissionRule holds up all waiting requests, a Requirement
only the one that does not meet it; the scheduler asks both each time a waiting request could start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

from octavo.core.request import Request
from octavo.exceptions import ValidationError
from octavo.messages import EngineCoreRequest


class LengthLimits:
    """What can ever be served. ``max_step_tokens``: longest prompt of one step, None if prompts may be split."""

    def __init__(self, *, max_model_len: int, max_kv_tokens: int, max_step_tokens: int | None) -> None:
        self._max_model_len = max_model_len
        self._max_kv_tokens = max_kv_tokens
        self._max_step_tokens = max_step_tokens

    def check(self, request: EngineCoreRequest) -> None:
        """Raises ValidationError, naming both numbers, if ``request`` could wait for ever."""
        length = len(request.prompt_token_ids)
        if length == 0:
            raise ValidationError("the prompt has no tokens", parameter="prompt", value=length)
        limits = [
            (
                self._max_model_len - 1,
                f"the model's context of {self._max_model_len} tokens leaves room for a prompt of",
            ),
            (self._max_kv_tokens, "the whole KV cache holds"),
        ]
        if self._max_step_tokens is not None:
            limits.append((self._max_step_tokens, "without chunked prefill a step (max_num_batched_tokens) computes"))
        for limit, what in limits:
            if length > limit:
                message = f"the prompt has {length} tokens, but {what} at most {limit}"
                raise ValidationError(message, parameter="prompt", value=length)

    def end(self, request: EngineCoreRequest) -> int:
        """Number of tokens at which ``request`` ends with reason "length".

        The last token of a sequence needs no KV, so one more than the pool holds can be reached: a request that
        outgrows the pool alone ends there, and any shorter one can be resubmitted after a preemption.
        """
        end = min(self._max_model_len, self._max_kv_tokens + 1)
        max_tokens = request.sampling_params.max_tokens
        return end if max_tokens is None else min(end, len(request.prompt_token_ids) + max_tokens)


class Requirement(Protocol):
    """What one request must have of its own before it may start. Those behind pass a request that lacks it."""

    def begin(self, running: Sequence[Request]) -> None:
        """The scheduler begins to look for the request to start next, while these run."""
        ...

    def is_met(self, request: Request) -> bool:
        """Asked again for each waiting request and step; may begin to fetch what is missing. Never raises."""
        ...


class GrammarReady:
    """The request's grammar is compiled where it will be used. One that cannot be counts too: the worker says why."""

    def __init__(self, prepare: Callable[[str], Future[Any]]) -> None:
        """``prepare`` begins to compile a grammar, once however often it is asked; the future is done when it is."""
        self._prepare = prepare
        self._missing: Future[Any] | None = None

    def begin(self, running: Sequence[Request]) -> None:
        """It does not depend on what runs."""

    def is_met(self, request: Request) -> bool:
        grammar = request.source.output.grammar
        if grammar is None:
            return True
        try:
            future = self._prepare(grammar)
        except Exception:
            return True
        if not future.done():
            self._missing = future
        return future.done()

    def wait(self, seconds: float) -> bool:
        """Wait for a grammar that was found missing since the last call, if there was one; False if not."""
        missing, self._missing = self._missing, None
        if missing is not None:
            wait([missing], seconds)
        return missing is not None


class TenantSeats:
    """At most ``max_running`` running sequences of each tenant: those beyond wait, and are passed by others."""

    def __init__(self) -> None:
        self._running: Sequence[Request] = ()
        self._counts: Counter[str] | None = None

    def begin(self, running: Sequence[Request]) -> None:
        self._running, self._counts = running, None

    def is_met(self, request: Request) -> bool:
        tenant = request.source.scheduling.tenant
        if tenant.max_running is None:
            return True
        if self._counts is None:
            self._counts = Counter()
            for one in self._running:
                self._counts[one.source.scheduling.tenant.name] += one.num_seats
        return self._counts[tenant.name] < tenant.max_running


class Deferral:
    """Passes requests that do not meet all ``requirements``. ``num_passed``: how many, in the last search."""

    def __init__(self, requirements: Sequence[Requirement]) -> None:
        self._requirements = requirements
        self.num_passed = 0

    def begin(self, running: Sequence[Request]) -> None:
        """A search for the request to start next begins."""
        self.num_passed = 0
        for requirement in self._requirements:
            requirement.begin(running)

    def is_ready(self, request: Request) -> bool:
        """Does ``request`` meet them all?"""
        for requirement in self._requirements:
            if not requirement.is_met(request):
                self.num_passed += 1
                return False
        return True


class AdmissionRule(Protocol):
    """A reason for all waiting requests to wait longer. It must hold for a limited time only."""

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        """May ``request`` start in this step? Asked again for each request and step; changes nothing."""
        ...


class MaxNumSeqs:
    """At most ``limit`` seats are taken; see ``Request.num_seats``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        return sum(other.num_seats for other in running) < self._limit
