"""How fast the engine works, measured while it does: the basis of every estimate of a wait."""

from __future__ import annotations

from octavo.messages import EngineCoreOutputs
from octavo.metrics.stats import IterationStats

MEMORY_SECONDS = 30.0  # of computing, after which a step counts for 1/e
MEMORY_REQUESTS = 0.05  # weight of the last request in the mean length of answers


class ServiceRate:
    """Tokens per second of computing, by ``num_cores`` side by side. Idle time does not count, so rates are of load."""

    def __init__(self, num_cores: int = 1) -> None:
        self._num_cores = num_cores
        self._seconds = self._prompt_tokens = self._output_tokens = 0.0
        self.mean_output: float | None = None  # tokens of an answer

    def record(self, outputs: EngineCoreOutputs, iteration: IterationStats) -> None:
        """Take in one step, and the requests that ended with it."""
        for request in iteration.finished:
            last, mean = request.num_generation_tokens, self.mean_output
            self.mean_output = float(last) if mean is None else mean + MEMORY_REQUESTS * (last - mean)
        stats = outputs.stats
        if stats is None or stats.step_seconds <= 0 or stats.iteration_tokens <= 0:
            return
        sampled = sum(len(output.new_token_ids) for output in outputs.outputs)
        kept = max(0.0, 1 - stats.step_seconds / MEMORY_SECONDS)
        self._seconds = kept * self._seconds + stats.step_seconds
        self._prompt_tokens = kept * self._prompt_tokens + max(0, stats.iteration_tokens - sampled)
        self._output_tokens = kept * self._output_tokens + sampled

    @property
    def prompt_tokens_per_second(self) -> float:
        """0.0 before anything was measured."""
        return self._num_cores * self._prompt_tokens / self._seconds if self._seconds else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """0.0 before anything was measured."""
        return self._num_cores * self._output_tokens / self._seconds if self._seconds else 0.0

    def seconds_for(self, prompt_tokens: float, output_tokens: float) -> float | None:
        """How long the engine will take for so much work, at the mix that it has had; None if nothing is known.

        Prompts and answers are computed side by side, so the longer of the two counts.
        """
        work = [
            (prompt_tokens, self.prompt_tokens_per_second),
            (output_tokens, self.output_tokens_per_second),
        ]
        times = [tokens / rate for tokens, rate in work if rate > 0]
        return max(times, default=None)
