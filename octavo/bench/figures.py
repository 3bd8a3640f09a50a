"""From arrival times to the figures of a serving benchmark, under the names that vLLM's bench uses.

TTFT: request sent to first token. E2EL: request sent to last token. TPOT: (E2EL - TTFT) / (tokens - 1). ITL: the gaps
between consecutive tokens of an answer; of k tokens that arrive together the first has waited and the others have not
(gap 0), so an answer's gaps add up to E2EL - TTFT. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass
class RequestRecord:
    """What became of one request. Times are seconds on one monotonic clock."""

    sent: float
    prompt_tokens: int
    output_tokens: int = 0  # as the server counts them
    arrivals: list[float] = field(default_factory=list)  # one a token, ascending
    cached_tokens: int = 0  # prompt tokens that the server had in its prefix cache
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token, which has no later ones."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def samples(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds under each metric's short name, over the requests that succeeded."""
    done = [record for record in records if record.error is None]
    return {
        "ttft": [record.ttft for record in done],
        "tpot": [tpot for record in done if (tpot := record.tpot) is not None],
        "itl": [gap for record in done for gap in record.itl],
        "e2el": [record.e2el for record in done],
    }


def percentile_name(percentile: float) -> str:
    """``p99``, ``p99.9``."""
    return f"p{percentile:g}"


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """The most answers under way at a time."""
    changes = [(record.sent, 1) for record in records if record.error is None]
    changes += [(record.arrivals[-1], -1) for record in records if record.error is None]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def summarise(
    records: Sequence[RequestRecord],
    duration: float,
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """The figures of a run that took ``duration`` seconds. Latencies in ms; None where there is nothing to measure."""
    done = [record for record in records if record.error is None]
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(r.cached_tokens for r in done),
        "request_throughput": len(done) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": peak_concurrency(done),
    }
    for name, values in samples(records).items():
        if name not in metrics:
            continue
        ms = np.asarray(values) * 1e3
        summary[f"mean_{name}_ms"] = float(ms.mean()) if len(ms) else None
        summary[f"median_{name}_ms"] = float(np.median(ms)) if len(ms) else None
        summary[f"std_{name}_ms"] = float(ms.std()) if len(ms) else None
        for percentile in percentiles:
            value = float(np.percentile(ms, percentile)) if len(ms) else None
            summary[f"{percentile_name(percentile)}_{name}_ms"] = value
    return summary
