"""n samples of one prompt: one request of the caller and of the core, n streams of tokens.

Sample i has the ``sample_index`` i, which is part of its random key. The core computes the prompt once and lets the
samples share its KV blocks (``core.family``). Knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.outputs import CompletionOutput, PromptLogprobs, RequestMetrics, RequestOutput
from octavo.messages import CacheUse, EngineCoreRequest, RequestOutputKind
from octavo.utils.logs import current_request_id


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
        self.label = current_request_id.get() or request_id  # what log lines call it
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.kind = request.sampling_params.output_kind
        self.n = request.sampling_params.n
        self.request = request  # for the core
        self.children = request.samples()  # what comes back
        self.prompt_logprobs: PromptLogprobs | None = None  # of the one prompt of all samples
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
        cache_use: CacheUse,
        prompt_logprobs: PromptLogprobs | None,
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
                cache_use=cache_use,
            )
        )
