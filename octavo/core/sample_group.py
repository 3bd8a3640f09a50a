"""SampleGroup: what a sampled token leads to. Usually to a longer request; with n > 1 or beams, to several requests.

    Solo       r                    r goes on until it ends
    Samples    r.0 --prompt--+----  r.0 goes on; at the prompt's end r.1, r.2 ... are born, each with a token of its own
                             +----  r.1
                             +----  r.2
    Beams      r --prompt--+--  r/1.0 --+--  r/2.0     each beam lives for one step: it wants one token, waits for the
                           +--  r/1.1   +--  r/2.1     others, and the best continuations of all are the next ones

A child is an ordinary request from its first step on. That it starts with its parent's blocks is the scheduler's work:
sample groups know neither blocks nor queues.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from octavo.core.beam_search import Search
from octavo.core.request import Request
from octavo.exceptions import ValidationError
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SamplingParams,
    TokenLogprobs,
)


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


class SampleGroup(Protocol):
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
    """The group of a request that is alone. It has no state: one serves all."""

    owed: Sequence[str] = ()
    num_unborn = 0

    def siblings(self) -> dict[str, int]:
        return {}

    def advance(
        self, request: Request, result: ModelRunnerOutput, prompt_logprobs: list[TokenLogprobs] | None
    ) -> Growth:
        output = request.append_sampled(result, prompt_logprobs)
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
        outputs = [child.append_sampled(result) for child in children]
        own = SOLO.advance(request, result, prompt_logprobs)
        request.sample_group = SOLO  # last: should anything above raise, they still end together
        going_on = [(request, c) for c, o in zip(children, outputs, strict=True) if o.finish_reason is None]
        return Growth([*own.outputs, *outputs], going_on, own.ended)

    def end(self, request_id: str, request: Request | None) -> tuple[Sequence[Request], Sequence[str]]:
        if request is None:
            del self._unborn[request_id]
            return (), (request_id,)
        return (request,), (request_id, *self._unborn)


class Beams:
    """A beam search: ``core.beam_search`` decides, this turns beams into requests and back.

    A beam is a request for one token and its rivals' log-probabilities. Reported, it is parked: its blocks stay for its
    children, which share them. The outputs come all at once, at the end, best first; a failing beam fails them all.
    """

    owed: Sequence[str]

    def __init__(self, results: Sequence[EngineCoreRequest], *, limit: int) -> None:
        """``results``: the outputs that are asked for; ``limit``: as of Request, for the whole search."""
        self.owed = [result.request_id for result in results]
        source, params = results[0], results[0].sampling_params
        assert params.beam_search is not None
        ends = {*params.stop_token_ids, *([] if params.ignore_eos else source.output.eos_token_ids)}
        num_prompt_tokens = len(source.prompt_token_ids)
        self._search = Search(
            params.beam_search,
            end_token_ids=ends,
            max_tokens=limit - num_prompt_tokens,
            min_tokens=params.min_tokens,
            num_rivals=sys.maxsize if params.logprobs == -1 else params.logprobs or 0,
        )
        num_logprobs = -1 if params.logprobs == -1 else max(params.logprobs or 0, self._search.num_candidates)
        self._stop_token_ids = set(params.stop_token_ids) - set(source.output.eos_token_ids)
        self._width = params.beam_search.beam_width
        beam_params = SamplingParams(
            temperature=0.0, logprobs=num_logprobs, skip_reading_prefix_cache=params.skip_reading_prefix_cache
        )
        self._source = msgspec.structs.replace(source, sampling_params=beam_params)
        self._beams: list[Request] = []
        self._reports: dict[str, TokenLogprobs] = {}
        self._generation = 0

    def begin(self, queued_time: float) -> Request:
        """The first beam: the prompt."""
        limit = len(self._source.prompt_token_ids) + 1
        self._beams = [Request(self._source, self, limit=limit, queued_time=queued_time)]
        return self._beams[0]

    @property
    def num_unborn(self) -> int:
        return self._width - 1 if self._generation == 0 else 0

    def siblings(self) -> dict[str, int]:
        return {}

    def advance(
        self, request: Request, result: ModelRunnerOutput, prompt_logprobs: list[TokenLogprobs] | None
    ) -> Growth:
        self._reports[request.request_id] = result.logprobs[request.request_id][0]
        if len(self._reports) < len(self._beams):
            return Growth(parked=True)
        parents, self._generation = self._beams, self._generation + 1
        chosen = self._search.advance([self._reports[beam.request_id] for beam in parents])
        self._reports = {}
        if not chosen:
            return Growth(self._results(parents[0]), ended=parents)
        born = [(parents[beam], self._child(parents[beam], i, token_id)) for i, (beam, token_id) in enumerate(chosen)]
        self._beams = [child for _, child in born]
        return Growth((), born, parents)

    def _child(self, parent: Request, index: int, token_id: int) -> Request:
        name = f"{self._source.request_id}/{self._generation}.{index}"
        source = msgspec.structs.replace(self._source, request_id=name)
        child = parent.fork(source, self, limit=parent.limit + 1)
        child.token_ids.append(token_id)
        return child

    def _results(self, last: Request) -> list[EngineCoreOutput]:
        """``last``: a beam that knows the facts of the search."""
        if len(self._search.finished) < len(self.owed):
            message = f"beam_width = {self._width}: the vocabulary has too few tokens for so many beams"
            raise ValidationError(message, parameter="beam_width")
        outputs = []
        for request_id, (_, node, ended) in zip(self.owed, self._search.finished, strict=False):
            path, stop = node.path(), node.token_id if node.token_id in self._stop_token_ids else None
            told = last.output(
                [step.token_id for step in path],
                logprobs=[step.logprobs for step in path],
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                stop_reason=stop if ended else None,
            )
            outputs.append(msgspec.structs.replace(told, request_id=request_id, facts=last.facts))
        return outputs

    def end(self, request_id: str, request: Request | None) -> tuple[Sequence[Request], Sequence[str]]:
        return self._beams, self.owed


def first_request(source: EngineCoreRequest, *, limit: int, queued_time: float) -> Request:
    """The request that computes the prompt. ``limit``: most tokens of a sequence."""
    samples = source.samples()
    if source.sampling_params.beam_search is not None:
        return Beams(samples, limit=limit).begin(queued_time)
    group = Samples(samples[1:]) if len(samples) > 1 else SOLO
    return Request(samples[0], group, limit=limit, queued_time=queued_time)
