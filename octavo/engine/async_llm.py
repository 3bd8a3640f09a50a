"""AsyncLLM: the engine for servers. The engine core runs in its own process; this side speaks text.

Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from octavo.config import EngineConfig
from octavo.engine.outputs import RequestOutput
from octavo.messages import EngineInfo, SamplingParams
from octavo.tokenizer.base import Tokenizer


class AsyncLLM:
    """Streams of tokens for many callers at once, on one event loop.

    ``info`` and ``tokenizer`` are valid from :meth:`create` on; ``num_running`` and ``num_waiting`` are those of the
    engine's last step.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    num_running: int
    num_waiting: int

    @classmethod
    async def create(cls, config: EngineConfig, on_phase: Callable[[str], None] | None = None) -> AsyncLLM:
        """Start the core process for a resolved ``config`` (local model path) and wait until it is ready.

        ``on_phase`` is called with the name of each start-up phase as it begins, on the event loop. Raises ModelError,
        ConfigError or EngineDeadError.
        """
        raise RuntimeError

    def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Check the request now, and return its stream; it is submitted when iteration begins.

        Raises ValidationError and EngineDeadError at the call. The iterator raises RequestError if a sequence fails
        while it runs and EngineDeadError if the core dies. Closing or cancelling the iterator aborts the request.
        ``request_id`` is only echoed and may repeat. Text is tokenised here, with special tokens; pass token ids to
        choose otherwise.
        """
        raise RuntimeError

    async def abort(self, request_id: str) -> None:
        """End every running request with this (external) id; their streams end with finish_reason abort."""

    async def check_health(self) -> None:
        """Raises EngineDeadError if the core is gone."""

    def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        raise RuntimeError

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, give running ones ``drain_seconds``, abort the rest, end the process. Idempotent."""
