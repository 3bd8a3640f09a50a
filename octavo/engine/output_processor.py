"""From the core's tokens to the caller's text: detokenising, stop strings, logprobs, and the times of each request.

One fault here (a detokeniser's exception) ends one request, with a line in the log. Knows nothing of sockets or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from octavo.engine.live_request import LiveRequest, Sample
from octavo.engine.outputs import CompletionOutput, Logprob
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestFault,
    RequestOutputKind,
    TokenLogprobs,
)
from octavo.metrics.stats import FinishedRequest, IterationStats
from octavo.tokenizer.base import Tokenizer


@dataclass(slots=True)
class Processed:
    """What one message came to: ids the core must now abort, and the numbers for the metrics."""

    abort_ids: list[str]
    iteration: IterationStats


class OutputProcessor:
    """The sequences of a front end that have not ended, by the ids that the core knows them by.

    ``clock`` gives the seconds that arrival times are in.
    """

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._samples: dict[str, Sample] = {}
        self._token_texts: dict[int, str] = {}  # no larger than the vocabulary

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def running_ids(self) -> list[str]:
        return list(self._samples)

    def add(self, live: LiveRequest) -> None:
        """Begin to follow all samples of a request."""
        for sample in live.samples:
            self._samples[sample.request.request_id] = sample

    def begun(self, core_ids: Iterable[str]) -> None:
        """The core has begun with these sequences: a request whose first sample is among them waits no longer."""
        for core_id in core_ids:
            sample = self._samples.get(core_id)
            if sample is not None and sample.request.sample_index == 0 and sample.live.place is not None:
                sample.live.place.leave()

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

    def end(self, live: LiveRequest, reason: FinishReason, detail: str | None = None) -> IterationStats:
        """End a request from this side, e.g. because its caller left; each sample that runs gets its last output.

        Never raises, so nothing stays behind.
        """
        iteration = IterationStats()
        for sample in live.samples:
            if not sample.ended:
                try:
                    if sample.detokenizer is not None:
                        sample.unsent.append(sample.detokenizer.update([], True).delta)
                    self._end(sample, reason, detail, iteration)
                except Exception as error:
                    self._break(sample, RequestFault.of(error, "ending it"), iteration)
        return iteration

    def end_all(self, reason: FinishReason, detail: str | None = None) -> None:
        """End every request."""
        for live in dict.fromkeys(sample.live for sample in self._samples.values()):
            self.end(live, reason, detail)

    # ---- one output of one sequence

    def _apply(self, sample: Sample, output: EngineCoreOutput, timestamp: float, processed: Processed) -> None:
        reason, stop_reason, fault = output.finish_reason, output.stop_reason, None
        if reason == FinishReason.ERROR:
            fault = output.error or RequestFault("internal error")
            stop_reason = sample.tell(fault)
        if sample.detokenizer is not None:
            shown = output.new_token_ids
            if reason == FinishReason.STOP and not sample.request.sampling_params.include_stop_str_in_output:
                shown = shown[:-1]  # the EOS or stop token ends the text and is no part of it
            update = sample.detokenizer.update(shown, reason is not None)
            if sample.live.kind == RequestOutputKind.DELTA:
                sample.unsent.append(update.delta)
            if update.stop_string is not None:
                if reason is None:
                    processed.abort_ids.append(output.request_id)
                reason, stop_reason = FinishReason.STOP, update.stop_string
                output = _cut(output, update.num_tokens)
        self._note_times(sample, output, timestamp, processed.iteration)
        self._add_logprobs(sample, output)
        sample.token_ids += output.new_token_ids
        sample.num_unsent += len(output.new_token_ids)
        if reason is not None:
            self._end(sample, reason, stop_reason, processed.iteration, fault)
        elif sample.due and sample.live.kind != RequestOutputKind.FINAL_ONLY:
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
        sample.ended = True
        self._emit(sample, completion)
        iteration.finished.append(_finished(sample, reason, self._clock()))

    def _break(self, sample: Sample, fault: RequestFault, iteration: IterationStats) -> None:
        """End a sequence whose output cannot be made: its last one says why, and has no text."""
        reason = sample.tell(fault)
        if self._samples.pop(sample.request.request_id, None) is None:
            return  # it had ended already
        sample.ended = True
        index = sample.request.sample_index
        error = FinishReason.ERROR.value
        bare = CompletionOutput(index, "", [], finish_reason=error, stop_reason=reason, fault=fault)
        sample.live.emit(bare, sample.metrics, None)
        iteration.finished.append(_finished(sample, FinishReason.ERROR, self._clock()))

    def _completion(self, sample: Sample, reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        """What the caller sees of a sample: with DELTA what is unsent, else all of it."""
        is_delta = sample.live.kind == RequestOutputKind.DELTA
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
        prompt_logprobs = sample.live.prompt_logprobs
        if sample.begun and sample.live.kind == RequestOutputKind.DELTA:
            prompt_logprobs = None
        sample.begun, sample.num_unsent = True, 0
        sample.unsent.clear()
        sample.live.emit(completion, sample.metrics, prompt_logprobs)

    # ---- logprobs and times

    def _add_logprobs(self, sample: Sample, output: EngineCoreOutput) -> None:
        if sample.logprobs is not None:
            for entry in output.new_logprobs or []:
                sample.logprobs.append(self._logprob_map(entry))
                sample.cumulative_logprob += entry.logprobs[0]
        if sample.live.prompt_logprobs is not None:
            for entry in output.new_prompt_logprobs or []:
                sample.live.prompt_logprobs.append(self._logprob_map(entry))

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
        if output.facts is not None:
            metrics.facts = output.facts
        if not output.new_token_ids:
            return
        iteration.num_generation_tokens += len(output.new_token_ids)
        begins = metrics.last_token_time is None and sample.request.sample_index == 0
        prompt_tokens = len(sample.request.prompt_token_ids) if begins else 0
        iteration.count_tenant(sample.live.request.scheduling.tenant.name, prompt_tokens, len(output.new_token_ids))
        if metrics.last_token_time is None:
            metrics.first_token_time = now
            if sample.request.sample_index == 0:  # the prompt of all samples is computed once
                iteration.num_prompt_tokens += len(sample.request.prompt_token_ids)
                iteration.num_cached_tokens += metrics.facts.num_cached_tokens
                iteration.num_external_tokens += metrics.facts.num_external_tokens
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


def _finished(sample: Sample, reason: FinishReason, now: float) -> FinishedRequest:
    """The record, for the metrics, of a sequence that ends ``now``."""
    metrics, num_tokens = sample.metrics, len(sample.token_ids)
    live = sample.live
    live.longest_sample = max(live.longest_sample, num_tokens)
    num_prompt_tokens = len(sample.request.prompt_token_ids)
    prefilled = metrics.first_token_time is not None
    num_computed = 0 if sample.request.sample_index > 0 else num_prompt_tokens - metrics.facts.num_cached_tokens

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else end - start

    decode = between(metrics.first_token_time, metrics.last_token_time)
    return FinishedRequest(
        reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=num_tokens,
        max_tokens=sample.request.sampling_params.max_tokens,
        num_preemptions=metrics.num_preemptions,
        e2e_seconds=now - metrics.arrival_time,
        queue_seconds=between(metrics.queued_time, metrics.scheduled_time),
        prefill_seconds=between(metrics.scheduled_time, metrics.first_token_time),
        decode_seconds=decode,
        inference_seconds=between(metrics.scheduled_time, metrics.last_token_time),
        seconds_per_output_token=decode / (num_tokens - 1) if decode is not None and num_tokens > 1 else None,
        num_computed_prompt_tokens=num_computed if prefilled else None,
        n=live.n if live.finished else None,
        max_num_generation_tokens=live.longest_sample if live.finished else None,
    )
