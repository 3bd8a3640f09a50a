"""LiveRequest: all that the front end keeps of a request, from the moment it is taken in to the end of its stream.

    request, request_id     what was asked, and the caller's name for it
    place, timers           its place in the waiting room, and how long it may wait and run
    samples                 what came of each of its n sequences: text, tokens, log-probabilities, times
    collector               what its caller has not read yet

The n samples are n sequences of one request: the core computes the prompt once and lets them share its KV blocks.
Sample i has the ``sample_index`` i, which is part of its random key. Knows nothing of sockets and queues.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.output_collector import OutputCollector
from octavo.engine.outputs import CompletionOutput, FlatLogprobs, Logprob, PromptLogprobs, RequestMetrics, RequestOutput
from octavo.engine.waiting_room import Place
from octavo.messages import EngineCoreRequest, RequestFault, RequestOutputKind, SamplingParams
from octavo.tokenizer.base import Tokenizer
from octavo.utils.logs import current_request_id

if TYPE_CHECKING:
    from octavo.engine.core_pool import PooledCore

logger = logging.getLogger(__name__)


class Sample:
    """One sequence of a request: what the core has been asked for, and what has come of it."""

    __slots__ = (
        "begun",
        "cumulative_logprob",
        "detokenizer",
        "ended",
        "interval",
        "live",
        "logprobs",
        "metrics",
        "num_unsent",
        "request",
        "token_ids",
        "unsent",
    )

    def __init__(self, live: LiveRequest, request: EngineCoreRequest, interval: int) -> None:
        """``interval``: least number of tokens between two outputs."""
        self.live, self.request, self.interval = live, request, interval
        self.ended = False  # its last output has been emitted
        self.reset()

    def reset(self) -> None:
        """Forget what has come of it: it is computed from the beginning."""
        params = self.request.sampling_params
        if params.wants_prompt_logprobs:
            self.live.prompt_logprobs = _unscored(self.request)
        self.detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            self.detokenizer = IncrementalDetokenizer(self.live.tokenizer, params, self.request.prompt_token_ids)
        self.metrics = RequestMetrics(arrival_time=self.request.arrival_time)
        self.token_ids: list[int] = []
        self.logprobs = _new_logprobs(params) if params.wants_logprobs else None
        self.cumulative_logprob = 0.0
        self.begun = False  # an output has been emitted
        self.num_unsent = 0  # tokens since the last output, and
        self.unsent: list[str] = []  # with DELTA, the text shown since

    @property
    def due(self) -> bool:
        """Whether enough is new for an output; the first token always is."""
        return self.num_unsent >= (self.interval if self.begun else 1)

    def tell(self, fault: RequestFault) -> str:
        """What the client is told of ``fault``, after the log has been; see :meth:`LiveRequest.tell`."""
        return self.live.tell(fault, self.request.request_id)


class LiveRequest:
    """One request of a caller: ``request`` for the core, under whose ``core_ids`` its sequences come back.

    It gathers its samples into RequestOutputs and hands them to ``sink``, or else to its ``collector``.
    ``times_submitted`` counts the engine cores it was handed to.
    """

    __slots__ = (
        "_latest",
        "_sink",
        "_unfinished",
        "collector",
        "core",
        "core_ids",
        "kind",
        "label",
        "longest_sample",
        "n",
        "place",
        "prompt",
        "prompt_logprobs",
        "request",
        "request_id",
        "samples",
        "timers",
        "times_submitted",
        "tokenizer",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        request: EngineCoreRequest,
        tokenizer: Tokenizer,
        *,
        stream_interval: int = 1,
        sink: Callable[[RequestOutput], None] | None = None,
        place: Place | None = None,
    ) -> None:
        """``stream_interval``: least number of tokens between two outputs; the request may ask for more."""
        params = request.sampling_params
        self.request_id, self.prompt, self.request, self.tokenizer = request_id, prompt, request, tokenizer
        self.label = current_request_id.get() or request_id  # what log lines call it
        self.kind, self.n, self.core_ids = params.output_kind, params.n, request.output_ids
        self.place, self.timers = place, list[asyncio.TimerHandle]()
        self.collector = OutputCollector(self.kind)
        self.times_submitted = 0
        self.core: PooledCore | None = None  # that computes it, of a pool
        self.prompt_logprobs: PromptLogprobs | None = None  # of the one prompt of all samples
        self.longest_sample = 0  # tokens, of the samples that have ended
        self._sink = sink or self.collector.put
        self._latest: dict[int, CompletionOutput] = {}
        self._unfinished = self.n
        interval = max(params.stream_interval or 1, stream_interval)
        self.samples = [Sample(self, one, interval) for one in request.samples()]

    @property
    def finished(self) -> bool:
        """Whether all samples have ended; the caller may still have to read the last of it."""
        return self._unfinished == 0

    @property
    def num_unfinished(self) -> int:
        """Samples that have not ended."""
        return self._unfinished

    @property
    def waits(self) -> bool:
        """Whether the core has not begun with it."""
        return self.place is not None and self.place.waits

    def emit(
        self, completion: CompletionOutput, metrics: RequestMetrics, prompt_logprobs: PromptLogprobs | None
    ) -> None:
        """Add one sample's news; hand on what the caller asked to hear."""
        if completion.finished:
            self._unfinished -= 1
            if self._unfinished == 0 and self.core is not None:
                self.core.forget(self)
        if self.kind == RequestOutputKind.DELTA:
            samples = [completion]
        else:
            self._latest[completion.index] = completion
            if self.kind == RequestOutputKind.FINAL_ONLY and not self.finished:
                return
            samples = [self._latest[index] for index in sorted(self._latest)]
        self._sink(
            RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=self.request.prompt_token_ids,
                outputs=samples,
                finished=self.finished,
                prompt_logprobs=prompt_logprobs,
                metrics=metrics,
            )
        )

    def to_submit(self) -> list[EngineCoreRequest]:
        """What an engine core is to be given: the request; or of one that a core was given before, what it still owes.

        That is the request itself if no sample has ended (beams end together), else each of the others alone. What
        has come of these is forgotten.
        """
        if self.times_submitted == 0:
            return [self.request]
        again = [sample for sample in self.samples if not sample.ended]
        for sample in again:
            sample.reset()
        return [sample.request for sample in again] if len(again) < self.n else [self.request]

    def close(self) -> None:
        """End its stay: its timers stop, and its place is free. Idempotent."""
        for timer in self.timers:
            timer.cancel()
        if self.place is not None:
            self.place.leave()

    def tell(self, fault: RequestFault, core_id: str | None = None) -> str:
        """What the client is told of ``fault``, after a line in the log: both name the same error id.

        ``core_id``: the sequence at fault, or the first one.
        """
        error_id = uuid.uuid4().hex
        named = (error_id, self.request_id, core_id or self.core_ids[0], fault.cause or fault.message)
        logger.error("error %s: request %s (%s) failed: %s", *named, extra={"request_id": self.label})
        return f"{fault.message} (error id {error_id})"


def _new_logprobs(params: SamplingParams) -> list[dict[int, Logprob]] | FlatLogprobs:
    return FlatLogprobs() if params.flat_logprobs else []


def _unscored(request: EngineCoreRequest) -> PromptLogprobs:
    """Entries of the prompt tokens that get no logprobs: those up to ``prompt_logprob_start``, the first at least."""
    params = request.sampling_params
    none = [None] * min(params.prompt_logprob_start + 1, len(request.prompt_token_ids))
    return FlatLogprobs(none) if params.flat_logprobs else [*none]
