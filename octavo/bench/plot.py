"""A picture of a serving benchmark: how each latency is distributed, and the tokens over time.

matplotlib is an optional extra (``pip install octavo[bench]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.bench.figures import METRICS, RequestRecord, samples
from octavo.exceptions import ConfigError

BIN_SECONDS = 0.5


def check_plot(path: str) -> None:
    """Raises ConfigError, before anything is measured, if a plot could not be drawn to ``path``."""
    if not path.endswith((".png", ".svg", ".pdf")):
        raise ConfigError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'octavo[bench]'") from error


def draw(records: Sequence[RequestRecord], title: str, path: str) -> None:
    """Cumulative distributions of TTFT, TPOT, ITL and E2EL, and output tokens/s over the run, to ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 4)
    figure.suptitle(title)
    for column, (name, values) in enumerate(samples(records).items()):
        _draw_distribution(figure.add_subplot(grid[0, column]), METRICS[name], np.sort(values) * 1e3)
    _draw_rate(figure.add_subplot(grid[1, :]), records)
    figure.savefig(path, dpi=110)


def _draw_distribution(axes: Any, label: str, ms: np.ndarray) -> None:
    axes.set_title(label, fontsize=10)
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if not len(ms):
        return
    axes.step(ms, np.arange(1, len(ms) + 1) / len(ms), where="post")
    for percentile, style in ((50, "--"), (99, ":")):
        value = float(np.percentile(ms, percentile))
        axes.axvline(value, linestyle=style, color="gray", label=f"p{percentile} {value:.1f}")
    axes.legend(fontsize=8, loc="lower right")


def _draw_rate(axes: Any, records: Sequence[RequestRecord]) -> None:
    done = [record for record in records if record.error is None]
    axes.set_xlabel("s")
    axes.set_ylabel("output tokens/s")
    axes.grid(alpha=0.3)
    if not done:
        return
    start = min(record.sent for record in done)
    times = np.concatenate([np.asarray(record.arrivals) - start for record in done])
    edges = np.arange(0, times.max() + BIN_SECONDS, BIN_SECONDS)
    counts, edges = np.histogram(times, edges if len(edges) > 1 else 1)
    axes.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.6)
