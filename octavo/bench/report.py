"""Results as people read them, and as files. Knows nothing of how they were measured."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from octavo.bench.figures import METRICS, percentile_name

WIDTH = 50


def _row(label: str, value: float | int | None) -> str:
    shown = "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{WIDTH - 10}}{shown:>10}"


def serve_report(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The screen that ``bench serve`` ends with; ``result`` is that of :func:`figures.summarise`."""
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        _row("Successful requests:", result["completed"]),
        _row("Failed requests:", result["failed"]),
        _row("Benchmark duration (s):", result["duration"]),
        _row("Total input tokens:", result["total_input_tokens"]),
        _row("of these from the prefix cache:", result["total_cached_tokens"]),
        _row("Total generated tokens:", result["total_output_tokens"]),
        _row("Request throughput (req/s):", result["request_throughput"]),
        _row("Output token throughput (tok/s):", result["output_throughput"]),
        _row("Total token throughput (tok/s):", result["total_token_throughput"]),
        _row("Peak concurrent requests:", result["max_concurrent_requests"]),
    ]
    for name in metrics:
        short = name.upper()
        lines.append(METRICS[name].center(WIDTH, "-"))
        lines.append(_row(f"Mean {short} (ms):", result[f"mean_{name}_ms"]))
        lines.append(_row(f"Median {short} (ms):", result[f"median_{name}_ms"]))
        for percentile in percentiles:
            label = percentile_name(percentile)
            lines.append(_row(f"{label.upper()} {short} (ms):", result[f"{label}_{name}_ms"]))
    lines.append("-" * WIDTH)
    cost = result["client_cpu_us_per_token"]
    lines.append(_row("Client CPU per token (us):", cost))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def latency_report(result: dict[str, Any]) -> str:
    """The screen of ``bench latency``."""
    lines = [f"Avg latency: {result['avg_latency']:.4f} seconds"]
    lines += [f"{p}% percentile latency: {value:.4f} seconds" for p, value in result["percentiles"].items()]
    lines.append(
        f"Prefill: {result['prefill_tokens_per_second']:,.1f} tokens/s "
        f"(first token after {result['median_first_token_latency'] * 1e3:.1f} ms)"
    )
    if "median_step_ms" in result:
        lines.append(
            f"Decode: {result['decode_tokens_per_second']:,.1f} tokens/s ({result['median_step_ms']:.3f} ms a step)"
        )
    return "\n".join(lines)


def throughput_report(result: dict[str, Any]) -> str:
    """The screen of ``bench throughput``."""
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )


def save_json(result: dict[str, Any], folder: str, name: str) -> str:
    """Write ``result`` to ``folder/name``; the path. The folder is made if need be."""
    os.makedirs(folder or ".", exist_ok=True)
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    return path
