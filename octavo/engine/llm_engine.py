"""LLMEngine: the synchronous engine, in this process. A caller adds requests and steps until they are done.

Knows nothing of progress bars or of how prompts are written down.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from octavo.config import EngineConfig
from octavo.engine.core_client import InprocClient
from octavo.engine.input_processor import InputProcessor
from octavo.engine.live_request import LiveRequest
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.outputs import RequestOutput
from octavo.messages import CacheOptions, FinishReason, ResetCache, SamplingParams, SchedulingOptions
from octavo.tokenizer import load_tokenizer


class LLMEngine:
    """One core, one caller. Not thread-safe.

    ``config`` is resolved (local model path). Raises ModelError or ConfigError.
    """

    def __init__(self, config: EngineConfig, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.tokenizer = load_tokenizer(config.model.model)
        self._client = InprocClient(config, on_phase)
        self.info = self._client.info
        self._input = InputProcessor(self.tokenizer, self.info, config)
        self._output = OutputProcessor(self.tokenizer)
        self._stream_interval = config.sampling.stream_interval
        self._news: list[RequestOutput] = []
        self._numbers = itertools.count()

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt_text: str | None = None,
        scheduling: SchedulingOptions = SchedulingOptions(),
        cache: CacheOptions = CacheOptions(),
    ) -> LiveRequest:
        """Check and queue a request. ``prompt_text`` is what RequestOutput.prompt says when ``prompt`` is ids.

        Raises ValidationError.
        """
        request = self._input.process(prompt, params, scheduling=scheduling, cache=cache)
        text = prompt if isinstance(prompt, str) else prompt_text
        request_id = request_id if request_id is not None else str(next(self._numbers))
        live = LiveRequest(
            request_id, text, request, self.tokenizer, stream_interval=self._stream_interval, sink=self._news.append
        )
        self._output.add(live)
        self._client.submit(live.to_submit())
        return live

    def has_unfinished(self) -> bool:
        return len(self._output) > 0

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs it gave, by the kind each request asked for. Raises EngineDeadError."""
        processed = self._output.process(self._client.step())
        self._client.submit(abort_ids=processed.abort_ids)
        news = list(self._news)
        self._news.clear()
        return news

    def abort_all(self) -> None:
        """End every request and free its blocks; the engine stays usable."""
        self._client.submit(abort_ids=self._output.running_ids)
        self._output.end_all(FinishReason.ABORT)
        self._news.clear()
        self.drain()

    def drain(self) -> None:
        """Step until the core has nothing left to do or to forget."""
        while self._client.has_work():
            self._client.step()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, in the pool and in tiers."""
        self._client.ask(ResetCache())

    def check_invariants(self) -> None:
        """Prove that no KV block is lost or shared wrongly. Raises InvariantError."""
        self._client.check_invariants()

    def shutdown(self) -> None:
        """Release the model; idempotent."""
        self._input.grammars.close()
        self._client.shutdown()
