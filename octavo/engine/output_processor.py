"""From the core's tokens to the caller's text: detokenising, stop strings, logprobs, and the times of each request.

One fault here (a detokeniser's exception) ends one request. Every request that fails, wherever it did, is one line in
the log, written from here: error id, the caller's id, the engine's, the cause. Knows nothing of sockets or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.fault_log import tell
from octavo.engine.outputs import CompletionOutput, FlatLogprobs, Logprob, PromptLogprobs, RequestMetrics
from octavo.engine.parallel_sampling import ParentRequest
from octavo.messages import (
    CacheUse,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestFault,
    RequestOutputKind,
    SamplingParams,
    TokenLogprobs,
)
from octavo.metrics.stats import FinishedRequest, IterationStats
from octavo.tokenizer.base import Tokenizer


@dataclass(slots=True)
class Sample:
    """One sample that is running in the core."""

    request: EngineCoreRequest
    parent: ParentRequest
    detokenizer: IncrementalDetokenizer | None
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    cumulative_logprob: float = 0.0
    cache_use: CacheUse = CacheUse()
    begun: bool = False  # an output has been emitted
    interval: int = 1  # tokens between two outputs
    num_unsent: int = 0  # tokens since the last output, and
    unsent: list[str] = field(default_factory=list)  # with DELTA, the text shown since

    @property
    def due(self) -> bool:
        """Whether enough is new for an output; the first token always is."""
        return self.num_unsent >= (self.interval if self.begun else 1)


@dataclass(slots=True)
class Processed:
    """What one message came to: ids the core must now abort, and the numbers for the metrics."""

    abort_ids: list[str]
    iteration: IterationStats


class OutputProcessor:
    """All running sequences of a front end. Outputs go to the sinks of their ParentRequests."""

    def __init__(self, tokenizer: Tokenizer, stream_interval: int = 1) -> None:
        """``stream_interval``: least number of tokens between two outputs; a request may ask for more."""
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._samples: dict[str, Sample] = {}
        self._token_texts: dict[int, str] = {}  # no larger than the vocabulary

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def running_ids(self) -> list[str]:
        return list(self._samples)

    def add(self, parent: ParentRequest) -> None:
        """Begin to follow all samples of a request."""
        for child in parent.children:
            self._begin(parent, child)

    def restart(self, parent: ParentRequest) -> list[EngineCoreRequest]:
        """Forget what has come of the samples of a request that have not ended; what is to be computed again.

        That is the request itself if none has ended (beams end together), else each sample alone.
        """
        again = [child for child in parent.children if child.request_id in self._samples]
        for child in again:
            self._begin(parent, child)
        return again if len(again) < len(parent.children) else [parent.request]

    def _begin(self, parent: ParentRequest, child: EngineCoreRequest) -> None:
        params = child.sampling_params
        if params.wants_prompt_logprobs:
            parent.prompt_logprobs = _unscored(child)
        detokenizer = None
        if params.detokenize:
            detokenizer = IncrementalDetokenizer(self._tokenizer, params, child.prompt_token_ids)
        self._samples[child.request_id] = Sample(
            request=child,
            parent=parent,
            detokenizer=detokenizer,
            metrics=RequestMetrics(arrival_time=child.arrival_time),
            logprobs=_new_logprobs(params) if params.wants_logprobs else None,
            interval=max(params.stream_interval or 1, self._stream_interval),
        )

    def process(self, outputs: EngineCoreOutputs) -> Processed:
        """Apply one step's outputs. Those of sequences that have already ended here are ignored. Never raises."""
        processed = Processed([], IterationStats())
        for output in outputs.outputs:
            sample = self._samples.get(output.request_id)
            if sample is None:
                continue
            try:
                self._apply(sample, output, outputs.timestamp, processed)
            except Exception as error:
                if output.finish_reason is None:
                    processed.abort_ids.append(output.request_id)
                self._break(sample, RequestFault.of(error, "making text of its tokens"), processed.iteration)
        return processed

    def end(self, request_ids: Iterable[str], reason: FinishReason, detail: str | None = None) -> IterationStats:
        """End sequences from this side, e.g. because their caller left; each gets its last output. Unknown ids pass.

        Never raises, so nothing stays behind.
        """
        iteration = IterationStats()
        for request_id in list(request_ids):
            if sample := self._samples.get(request_id):
                try:
                    if sample.detokenizer is not None:
                        sample.unsent.append(sample.detokenizer.update([], True).delta)
                    self._end(sample, reason, detail, iteration)
                except Exception as error:
                    self._break(sample, RequestFault.of(error, "ending it"), iteration)
        return iteration

    def end_all(self, reason: FinishReason, detail: str | None = None) -> IterationStats:
        """End every sample."""
        return self.end(list(self._samples), reason, detail)

    # ---- one output of one sequence

    def _apply(self, sample: Sample, output: EngineCoreOutput, timestamp: float, processed: Processed) -> None:
        reason, stop_reason, fault = output.finish_reason, output.stop_reason, None
        if reason == FinishReason.ERROR:
            fault = output.error or RequestFault("internal error")
            stop_reason = self._tell(sample, fault)
        if sample.detokenizer is not None:
            shown = output.new_token_ids
            if reason == FinishReason.STOP and not sample.request.sampling_params.include_stop_str_in_output:
                shown = shown[:-1]  # the EOS or stop token ends the text and is no part of it
            update = sample.detokenizer.update(shown, reason is not None)
            if sample.parent.kind == RequestOutputKind.DELTA:
                sample.unsent.append(update.delta)
            if update.stop_string is not None:
                if reason is None:
                    processed.abort_ids.append(output.request_id)
                reason, stop_reason = FinishReason.STOP, update.stop_string
                output = _cut(output, update.num_tokens)
        self._note_times(sample, output, timestamp, processed.iteration)
        self._take_logprobs(sample, output)
        sample.token_ids += output.new_token_ids
        sample.num_unsent += len(output.new_token_ids)
        if reason is not None:
            self._end(sample, reason, stop_reason, processed.iteration, fault)
        elif sample.due and sample.parent.wants(finished=False):
            self._emit(sample, self._completion(sample, None, None))

    def _end(
        self,
        sample: Sample,
        reason: FinishReason,
        stop_reason: int | str | None,
        iteration: IterationStats,
        fault: RequestFault | None = None,
    ) -> None:
        """Forget the sequence, count it, and emit its last output."""
        completion = self._completion(sample, reason.value, stop_reason)
        completion.fault = fault
        del self._samples[sample.request.request_id]
        self._emit(sample, completion)
        iteration.finished.append(_finished(sample, reason))

    def _break(self, sample: Sample, fault: RequestFault, iteration: IterationStats) -> None:
        """End a sequence whose output cannot be made: its last one says why, and has no text."""
        reason = self._tell(sample, fault)
        if self._samples.pop(sample.request.request_id, None) is None:
            return  # it had ended already
        index = sample.request.sample_index
        error = FinishReason.ERROR.value
        bare = CompletionOutput(index, "", [], finish_reason=error, stop_reason=reason, fault=fault)
        sample.parent.emit(bare, sample.metrics, sample.cache_use, None)
        iteration.finished.append(_finished(sample, FinishReason.ERROR))

    @staticmethod
    def _tell(sample: Sample, fault: RequestFault) -> str:
        return tell(fault, sample.parent.request_id, sample.request.request_id, sample.parent.label)

    def _completion(self, sample: Sample, reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        """What the caller sees of a sample: with DELTA what is unsent, else all of it."""
        is_delta = sample.parent.kind == RequestOutputKind.DELTA
        start = len(sample.token_ids) - sample.num_unsent if is_delta else 0
        text = "".join(sample.unsent)
        if not is_delta:
            text = sample.detokenizer.text if sample.detokenizer else ""
        return CompletionOutput(
            index=sample.request.sample_index,
            text=text,
            token_ids=sample.token_ids[start:],
            cumulative_logprob=None if sample.logprobs is None else sample.cumulative_logprob,
            logprobs=None if sample.logprobs is None else sample.logprobs[start:],
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _emit(self, sample: Sample, completion: CompletionOutput) -> None:
        prompt_logprobs = sample.parent.prompt_logprobs
        if sample.begun and sample.parent.kind == RequestOutputKind.DELTA:
            prompt_logprobs = None
        sample.begun, sample.num_unsent = True, 0
        sample.unsent.clear()
        sample.parent.emit(completion, sample.metrics, sample.cache_use, prompt_logprobs)

    # ---- logprobs and times

    def _take_logprobs(self, sample: Sample, output: EngineCoreOutput) -> None:
        if sample.logprobs is not None:
            for entry in output.new_logprobs or []:
                sample.logprobs.append(self._logprob_map(entry))
                sample.cumulative_logprob += entry.logprobs[0]
        if sample.parent.prompt_logprobs is not None:
            for entry in output.new_prompt_logprobs or []:
                sample.parent.prompt_logprobs.append(self._logprob_map(entry))

    def _logprob_map(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """By token id, the token itself first. It may come again among the others, with the same values."""
        return {
            token_id: Logprob(logprob, rank, self._token_text(token_id))
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks)
        }

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    @staticmethod
    def _note_times(sample: Sample, output: EngineCoreOutput, now: float, iteration: IterationStats) -> None:
        metrics = sample.metrics
        if output.times is not None:
            metrics.queued_time, metrics.scheduled_time = output.times.queued, output.times.scheduled
        if output.cache_use is not None:
            sample.cache_use = output.cache_use
        metrics.num_preemptions = max(metrics.num_preemptions, output.num_preemptions)
        if not output.new_token_ids:
            return
        iteration.num_generation_tokens += len(output.new_token_ids)
        begins = metrics.last_token_time is None and sample.request.sample_index == 0
        prompt_tokens = len(sample.request.prompt_token_ids) if begins else 0
        iteration.count_tenant(sample.parent.request.scheduling.tenant.name, prompt_tokens, len(output.new_token_ids))
        if metrics.last_token_time is None:
            metrics.first_token_time = now
            if sample.request.sample_index == 0:  # the prompt of all samples is computed once
                iteration.num_prompt_tokens += len(sample.request.prompt_token_ids)
                iteration.num_cached_tokens += sample.cache_use.num_cached_tokens
                iteration.num_external_tokens += sample.cache_use.num_external_tokens
            iteration.first_token_seconds.append(now - metrics.arrival_time)
        else:
            iteration.inter_token_seconds.append(now - metrics.last_token_time)
        metrics.last_token_time = now


def _cut(output: EngineCoreOutput, num_tokens: int) -> EngineCoreOutput:
    """``output`` with only its first ``num_tokens`` tokens."""
    logprobs = output.new_logprobs
    return msgspec.structs.replace(
        output,
        new_token_ids=output.new_token_ids[:num_tokens],
        new_logprobs=logprobs[:num_tokens] if logprobs is not None else None,
    )


def _new_logprobs(params: SamplingParams) -> list[dict[int, Logprob]] | FlatLogprobs:
    return FlatLogprobs() if params.flat_logprobs else []


def _unscored(request: EngineCoreRequest) -> PromptLogprobs:
    """Entries of the prompt tokens that get no logprobs: those up to ``prompt_logprob_start``, the first at least."""
    params = request.sampling_params
    none = [None] * min(params.prompt_logprob_start + 1, len(request.prompt_token_ids))
    return FlatLogprobs(none) if params.flat_logprobs else [*none]


def _finished(sample: Sample, reason: FinishReason) -> FinishedRequest:
    """The record of a sequence for the metrics."""
    metrics, num_tokens = sample.metrics, len(sample.token_ids)
    parent = sample.parent
    parent.longest_sample = max(parent.longest_sample, num_tokens)
    num_prompt_tokens = len(sample.request.prompt_token_ids)
    prefilled = metrics.first_token_time is not None
    num_computed = 0 if sample.request.sample_index > 0 else num_prompt_tokens - sample.cache_use.num_cached_tokens

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else end - start

    decode = between(metrics.first_token_time, metrics.last_token_time)
    return FinishedRequest(
        reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=num_tokens,
        max_tokens=sample.request.sampling_params.max_tokens,
        num_preemptions=metrics.num_preemptions,
        e2e_seconds=time.monotonic() - metrics.arrival_time,
        queue_seconds=between(metrics.queued_time, metrics.scheduled_time),
        prefill_seconds=between(metrics.scheduled_time, metrics.first_token_time),
        decode_seconds=decode,
        inference_seconds=between(metrics.scheduled_time, metrics.last_token_time),
        seconds_per_output_token=decode / (num_tokens - 1) if decode is not None and num_tokens > 1 else None,
        num_computed_prompt_tokens=num_computed if prefilled else None,
        n=parent.n if parent.finished else None,
        max_num_generation_tokens=parent.longest_sample if parent.finished else None,
    )
