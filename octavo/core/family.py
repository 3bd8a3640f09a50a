"""Families: what a sampled token leads to. Usually to a longer request; with n > 1 or beams, to several requests.

    Solo       r                    r goes on until it ends
    Samples    r.0 --prompt--+----  r.0 goes on; at the prompt's end r.1, r.2 ... are born, each with a token of its own
                             +----  r.1
                             +----  r.2

A child is an ordinary request from its first step on. That it starts with its parent's blocks is the scheduler's work:
families know neither blocks nor queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from octavo.core.request import Request
from octavo.messages import EngineCoreOutput, EngineCoreRequest, ModelRunnerOutput, TokenLogprobs


class Growth(NamedTuple):
    """What became of a request whose token was sampled.

    ``born``: (parent, child) in the order in which the children shall run; a child's last token has yet to be
    computed, all others are its parent's. ``ended`` requests leave for good, after the births. ``parked``: the request
    itself leaves the running set, with its blocks.
    """

    outputs: Sequence[EngineCoreOutput] = ()
    born: Sequence[tuple[Request, Request]] = ()
    ended: Sequence[Request] = ()
    parked: bool = False


class Family(Protocol):
    """Requests that come of one prompt. Every request belongs to one."""

    @property
    def owed(self) -> Sequence[str]:
        """Ids under which outputs will come, though no request has them (yet)."""
        ...

    @property
    def num_unborn(self) -> int:
        """How many more requests will soon want to run: a place is kept for each."""
        ...

    def siblings(self) -> dict[str, int]:
        """See ``SchedulerOutput``: the samples that take their first token when the running one does."""
        ...

    def advance(
        self, request: Request, result: ModelRunnerOutput, prompt_logprobs: list[TokenLogprobs] | None
    ) -> Growth:
        """``request`` was sampled. ``prompt_logprobs`` are to be passed on."""
        ...

    def end(self, request_id: str, request: Request | None) -> tuple[Sequence[Request], Sequence[str]]:
        """``request_id`` (of ``request``, or owed) ends from outside: all requests and ids of outputs that end so."""
        ...


class Solo:
    """The family of a request that has no relatives. It has no state: one serves all."""

    owed: Sequence[str] = ()
    num_unborn = 0

    def siblings(self) -> dict[str, int]:
        return {}

    def advance(
        self, request: Request, result: ModelRunnerOutput, prompt_logprobs: list[TokenLogprobs] | None
    ) -> Growth:
        output = request.take(result, prompt_logprobs)
        return Growth((output,), ended=(request,) if output.finish_reason is not None else ())

    def end(self, request_id: str, request: Request | None) -> tuple[Sequence[Request], Sequence[str]]:
        return (() if request is None else (request,)), (request_id,)


SOLO = Solo()


class Samples:
    """n > 1 samples of one prompt, until it is computed; then each of them is alone.

    Until then they are one request: what ends the first one ends them all.
    """

    def __init__(self, unborn: Sequence[EngineCoreRequest]) -> None:
        """``unborn``: all samples but the first."""
        self._unborn = {source.request_id: source for source in unborn}

    @property
    def owed(self) -> Sequence[str]:
        return list(self._unborn)

    @property
    def num_unborn(self) -> int:
        return len(self._unborn)

    def siblings(self) -> dict[str, int]:
        return {request_id: source.sample_index for request_id, source in self._unborn.items()}

    def advance(
        self, request: Request, result: ModelRunnerOutput, prompt_logprobs: list[TokenLogprobs] | None
    ) -> Growth:
        children = [request.fork(source, SOLO, limit=request.limit) for source in self._unborn.values()]
        outputs = [child.take(result) for child in children]
        own = SOLO.advance(request, result, prompt_logprobs)
        request.family = SOLO  # last: should anything above raise, they still end together
        going_on = [(request, c) for c, o in zip(children, outputs, strict=True) if o.finish_reason is None]
        return Growth([*own.outputs, *outputs], going_on, own.ended)

    def end(self, request_id: str, request: Request | None) -> tuple[Sequence[Request], Sequence[str]]:
        if request is None:
            del self._unborn[request_id]
            return (), (request_id,)
        return (request,), (request_id, *self._unborn)


def family_of(samples: Sequence[EngineCoreRequest]) -> Family:
    """The family of a new request, whose first sample will run."""
    return Samples(samples[1:]) if len(samples) > 1 else SOLO
