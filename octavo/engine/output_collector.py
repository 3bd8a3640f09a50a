"""The mailbox between the engine and one consumer: it holds one output, into which later ones are merged.

So a slow reader costs no more memory than its own text, and delays no other. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from octavo.engine.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from octavo.messages import RequestOutputKind


def joined(older: Sequence[dict[int, Logprob]], newer: Sequence[dict[int, Logprob]]) -> Sequence[dict[int, Logprob]]:
    """Both, in the form of the newer one."""
    both = [*older, *newer]
    return FlatLogprobs(both) if isinstance(newer, FlatLogprobs) else both


def merge_delta(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    """One delta out of two that follow each other."""
    return CompletionOutput(
        index=newer.index,
        text=older.text + newer.text,
        token_ids=older.token_ids + newer.token_ids,
        cumulative_logprob=newer.cumulative_logprob,
        logprobs=None if newer.logprobs is None else joined(older.logprobs or [], newer.logprobs),
        finish_reason=newer.finish_reason,
        stop_reason=newer.stop_reason,
        fault=newer.fault,
    )


class OutputCollector:
    """Outputs in, outputs out, merged until they are read. True while it holds one.

    ``was_read``: the consumer has been given something. While ``held``, it is given only errors and whole answers.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self.was_read = False
        self._held = False
        self._waiter: asyncio.Future[None] | None = None  # of the consumer; half the price of an Event

    def __bool__(self) -> bool:
        return self._output is not None

    def put(self, output: RequestOutput) -> None:
        """Add an output. Never blocks, and never raises: a fault in here is the consumer's to hear."""
        try:
            if self._output is not None and self._kind == RequestOutputKind.DELTA:
                output = self._merged(self._output, output)
            self._output = output
        except Exception as error:
            self._error = error
        self._wake()

    def hold(self) -> None:
        """Keep what comes until :meth:`release`. Forget what has not been read of samples that have not ended."""
        self._held = True
        if self._output is not None:
            self._output.outputs = [sample for sample in self._output.outputs if sample.finished]
            self._output = self._output if self._output.outputs else None

    def release(self) -> None:
        self._held = False
        self._wake()

    def fail(self, error: Exception) -> None:
        """What :meth:`get` raises from now on."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """All that came since the last call, as one output; waits for the first. Raises the error of :meth:`fail`."""
        while self._error is None:
            if self._output is not None and (not self._held or self._output.finished):
                output, self._output = self._output, None
                self.was_read = True
                return output
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        raise self._error

    @staticmethod
    def _merged(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
        samples = {sample.index: sample for sample in older.outputs}
        for sample in newer.outputs:
            known = samples.get(sample.index)
            samples[sample.index] = merge_delta(known, sample) if known else sample
        newer.outputs = [samples[index] for index in sorted(samples)]
        if newer.prompt_logprobs is None:
            newer.prompt_logprobs = older.prompt_logprobs
        return newer
