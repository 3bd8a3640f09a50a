"""n samples of one prompt: one request of the caller, n sequences of the core.

Sample i is the child with ``sample_index`` i, which is part of its random key; the prompt's KV blocks are shared by
the prefix cache. With n = 1 the request is its own child.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from octavo.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.messages import EngineCoreRequest, RequestOutputKind


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The sequences to run for a request, by sample index."""
    n = request.sampling_params.n
    if n == 1:
        return [request]
    params = request.sampling_params.replace(n=1)
    return [
        msgspec.structs.replace(
            request, request_id=f"{request.request_id}.{index}", sampling_params=params, sample_index=index
        )
        for index in range(n)
    ]


class ParentRequest:
    """A caller's request: gathers its samples into RequestOutputs and hands them to ``sink``."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        request: EngineCoreRequest,
        sink: Callable[[RequestOutput], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.kind = request.sampling_params.output_kind
        self.n = request.sampling_params.n
        self.children = fan_out(request)
        self.longest_sample = 0  # tokens, of the samples that have ended
        self.times_submitted = 0  # to an engine core
        self._sink = sink
        self._latest: dict[int, CompletionOutput] = {}
        self._unfinished = self.n

    @property
    def child_ids(self) -> list[str]:
        return [child.request_id for child in self.children]

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def wants(self, finished: bool) -> bool:
        """Whether a sample's state is worth making an output of."""
        return finished or self.kind != RequestOutputKind.FINAL_ONLY

    def emit(
        self,
        completion: CompletionOutput,
        metrics: RequestMetrics,
        num_cached_tokens: int,
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
    ) -> None:
        """Take one sample's news; hand on what the caller asked to hear."""
        if completion.finished:
            self._unfinished -= 1
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
                prompt_token_ids=self.prompt_token_ids,
                outputs=samples,
                finished=self.finished,
                prompt_logprobs=prompt_logprobs,
                metrics=metrics,
                num_cached_tokens=num_cached_tokens,
            )
        )
