"""An engine with AsyncLLM's interface and no model: it answers with the alphabet, one letter a token.

For the shapes of the protocol only; every end-to-end test uses the real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from octavo.config import QueueConfig, SamplingConfig, TenantTable
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.pins import PinLimits
from octavo.core.queries import CoreState, reply_to
from octavo.engine.deadlines import Deadlines
from octavo.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.engine.tenants import Tenants
from octavo.exceptions import EngineDeadError, OverloadedError, RequestError, ValidationError
from octavo.messages import (
    Answer,
    EngineInfo,
    Query,
    RequestFacts,
    RequestOutputKind,
    SamplingParams,
    SchedulingOptions,
)

VOCAB = 128
FACTS = RequestFacts(queued_time=10.0, scheduled_time=10.5, num_cached_tokens=3)
METRICS = RequestMetrics(10.0, first_token_time=11.0, last_token_time=12.0, facts=FACTS)


class FakeTokenizer:
    """Token id = code point; id 1 is BOS."""

    vocab_size = VOCAB
    eos_token_ids = [2]  # noqa: RUF012
    chat_template = "fake"
    special_token_ids = frozenset({1, 2})
    longest_token = 1

    def __init__(self, bos_token_id: int | None = 1) -> None:
        self.bos_token_id = bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        head = [1] if add_special_tokens and self.bos_token_id is not None else []
        return head + [ord(c) % VOCAB for c in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(t) for t in token_ids if not (skip_special_tokens and t in self.special_token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_string(self, token_id: int) -> str:
        return chr(token_id)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        text = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return text + ("assistant:" if options["add_generation_prompt"] else "")


class ToolTokenizer(FakeTokenizer):
    """With a template that takes tools, and has calls and thinking written between tags."""

    chat_template = "<think></think> <tool_call></tool_call>"

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        head = "".join(json.dumps(tool) for tool in options.get("tools") or [])
        calls = "".join(json.dumps(call) for m in messages for call in m.get("tool_calls", []))
        return head + calls + super().apply_chat_template(messages, **options)


class FakeEngine:
    """Emits ``abc...`` until max_tokens, or ``text`` and then EOS; ``fail_after`` so many it raises ``failure``."""

    def __init__(self, *, max_model_len: int = 64, delay: float = 0.0, bos: bool = True) -> None:
        self.tokenizer = FakeTokenizer(1 if bos else None)
        self.info = EngineInfo(
            max_model_len=max_model_len, vocab_size=VOCAB, num_blocks=9, block_size=16, kv_cache_bytes=1
        )
        self.delay, self.dead = delay, False
        self.fail_after: int | None = None
        self.failure: Exception = RequestError("this one failed")
        self.text: str | None = None
        self.num_waiting = 0
        self.overload: OverloadedError | None = None
        self.tenants: list[str] = []
        self.timeouts: list[float | None] = []
        self.table = Tenants(TenantTable())
        # no time passes in it: else a pin for a moment would be gone before it is taken back
        kv = KVCacheManager(9, 16, pin_limits=PinLimits(4, 2), clock=lambda: 0.0)
        self._core = CoreState(kv, {}, [], lambda: 0.0)
        self._abort_ids: set[str | None] = set()
        self.running = 0
        self.aborted = 0
        self.seen: list[SamplingParams] = []

    def generate(
        self, prompt: str | list[int], sampling_params: SamplingParams, *, request_id: str | None = None, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        assert not isinstance(prompt, str)
        sampling_params.verify(vocab_size=VOCAB, limits=SamplingConfig())
        if any(not 0 <= token < VOCAB for token in prompt):
            raise ValidationError(f"prompt: token ids must be in [0, {VOCAB - 1}]", parameter="prompt")
        self.seen.append(sampling_params)
        return self._run(prompt, sampling_params, request_id)

    async def check_constraint(self, sampling_params: SamplingParams) -> None:
        """Nothing is ever constrained here."""

    def check_queue(self, tenant: str = "") -> None:
        """Raises ``overload``, if it is set, as an engine with a full queue does."""
        if self.overload is not None:
            raise self.overload

    def reserve(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], scheduling: SchedulingOptions
    ) -> list[None]:
        self.check_queue()
        self.timeouts.append(Deadlines(QueueConfig()).timeout(scheduling.timeout))
        self.tenants.append(scheduling.tenant.name)
        return [None] * len(prompts)

    def bound(self, params: SamplingParams, scheduling: SchedulingOptions, *, explicit: bool) -> SamplingParams:
        return self.table.bound(params, scheduling, explicit=explicit)

    @property
    def num_running(self) -> int:
        return self.running

    async def abort(self, request_id: str) -> None:
        self._abort_ids.add(request_id)

    async def _run(
        self, prompt: list[int], params: SamplingParams, request_id: str | None
    ) -> AsyncIterator[RequestOutput]:
        self.running += 1
        finished = False
        try:
            limit = params.max_tokens or 0
            ids = [ord("a") + i % 26 for i in range(limit)] if self.text is None else list(map(ord, self.text[:limit]))
            reason = "stop" if self.text is not None and len(self.text) < limit else "length"
            steps = [[i] for i in ids] if params.output_kind == RequestOutputKind.DELTA else [ids]
            for number, step in enumerate(steps):
                await asyncio.sleep(self.delay * len(step))
                if self.fail_after is not None and number >= self.fail_after:
                    raise self.failure
                finished = number == len(steps) - 1
                if request_id in self._abort_ids:
                    finished, reason = True, "abort"
                yield self._output(prompt, params, step, first=number == 0, finish_reason=reason if finished else None)
                if finished:
                    return
        finally:
            self.running -= 1
            self.aborted += not finished

    def _output(
        self, prompt: list[int], params: SamplingParams, ids: list[int], *, first: bool, finish_reason: str | None
    ) -> RequestOutput:
        logprobs = None if params.logprobs is None else [self._entry(t, params.logprobs) for t in ids]
        outputs = [
            CompletionOutput(i, "".join(map(chr, ids)), ids, 0.0, logprobs, finish_reason) for i in range(params.n)
        ]
        scored = None
        if first and params.prompt_logprobs is not None:
            scored = [None, *(self._entry(t, params.prompt_logprobs) for t in prompt[1:])]
        return RequestOutput("r", None, prompt, outputs, finish_reason is not None, scored, METRICS)

    @staticmethod
    def _entry(token_id: int, top: int) -> dict[int, Logprob]:
        """The token itself at rank 2 with minus infinity's worth of logprob, then the top k."""
        entry = {token_id: Logprob(-1e30, 2, chr(token_id))}
        for rank in range(1, top + 1):
            if rank != 2:
                entry[(token_id + rank) % VOCAB] = Logprob(-0.5 * rank, rank, "?")
        return entry

    async def ask(self, query: Query[Answer]) -> Answer:
        """The answer of a core whose pool no request has used."""
        return reply_to(query, self._core).result(query)

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("the engine core has died")

    def render_metrics(self) -> bytes:
        return b"vllm:num_requests_running 0.0\n"
