"""Where KV memory goes: four ways to allocate it, the same requests, one memory.

    python benchmarks/kv_waste.py                   the table (Markdown)
    python benchmarks/kv_waste.py plot              and docs/concepts/kv-waste.png

As the PagedAttention paper's figures 2 and 12 (Kwon et al., SOSP 2023): three allocators that give each request one
contiguous piece when it starts (``max``: for the longest sequence that the model takes; ``pow2``: prompt, and room for
the answer rounded up to a power of two; ``oracle``: prompt and the answer's true length), first fit, neighbours joined
when freed; and octavo's scheduler and block pool, the real ones, without a model. All requests wait from the start, in
one queue, first come first served, a token a step each; prompts are computed in the step in which they start (octavo:
4,096 tokens a step). Lengths are those of ``lengths.py``. Nothing is shared: prefix caching is off.

Shares are of the whole memory, in token slots, averaged over the steps in which requests wait for memory:

    token states   slots that hold K and V
    reserved       will hold them later in the same request's life
    internal       belong to a request and never will
    external       belong to nobody while somebody waits
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from lengths import ALPACA, SHAREGPT, Lengths

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.factory import make_scheduler
from octavo.messages import EngineCoreRequest, ModelRunnerOutput, SamplingParams

PLOT = Path(__file__).parents[1] / "docs" / "concepts" / "kv-waste.png"
SLOTS = 16_384  # of the memory: OPT-13B beside its weights on 40 GB has room for about as many
LONGEST = 2048  # tokens of a sequence
FILLS = 20  # how often the requests of a run, all together, would fill the memory
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PARTS = ("token states", "reserved", "internal", "external")


class Shares(NamedTuple):
    """Slots by what they are for, at one moment, and how many requests run."""

    states: int
    reserved: int
    internal: int
    external: int
    running: int


@dataclass
class Piece:
    """Contiguous memory of one running request; ``final`` tokens will lie in it, ``computed`` do."""

    start: int
    size: int
    final: int
    computed: int


class Contiguous:
    """First fit over a line of ``SLOTS`` token slots; ``size_of`` (prompt, answer) is what a request is given."""

    def __init__(self, size_of: Callable[[int, int], int]) -> None:
        self._size_of = size_of
        self._pieces: list[Piece] = []  # by start

    def start(self, prompt: int, answer: int) -> bool:
        """Give a request its piece; False if no hole is large enough."""
        size, begin = self._size_of(prompt, answer), 0
        for index, piece in enumerate([*self._pieces, Piece(SLOTS, 0, 0, 0)]):
            if piece.start - begin >= size:
                self._pieces.insert(index, Piece(begin, size, prompt + answer, prompt))
                return True
            begin = piece.start + piece.size
        return False

    def step(self) -> Shares:
        """What memory holds now; then every request computes a token, and those that are complete leave."""
        held = sum(piece.size for piece in self._pieces)
        states = sum(piece.computed for piece in self._pieces)
        final = sum(piece.final for piece in self._pieces)
        shares = Shares(states, final - states, held - final, SLOTS - held, len(self._pieces))
        for piece in self._pieces:
            piece.computed += 1
        self._pieces = [piece for piece in self._pieces if piece.computed < piece.final]
        return shares


def run_contiguous(lengths: list[tuple[int, int]], size_of: Callable[[int, int], int]) -> Iterator[Shares]:
    """Every step in which requests wait."""
    waiting, memory = deque(lengths), Contiguous(size_of)
    while waiting:
        while waiting and memory.start(*waiting[0]):
            waiting.popleft()
        if waiting:
            yield memory.step()


def power_of_two(prompt: int, answer: int) -> int:
    return min(LONGEST, prompt + (1 << (answer - 1).bit_length()))


def run_paged(lengths: list[tuple[int, int]], block_size: int) -> Iterator[Shares]:
    """The same with octavo's scheduler and pool."""
    config = SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=4096)
    cache = CacheConfig(enable_prefix_caching=False)
    object.__setattr__(cache, "block_size", block_size)  # kernels take 16 and more, the pool takes any
    num_blocks = SLOTS // block_size
    scheduler = make_scheduler(config, cache, num_blocks + 1, LONGEST)
    for i, (prompt, answer) in enumerate(lengths):
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        scheduler.add_request(
            EngineCoreRequest(request_id=str(i), prompt_token_ids=[i] * prompt, sampling_params=params, arrival_time=0)
        )
    known = {str(i): prompt for i, (prompt, _) in enumerate(lengths)}
    computed = dict.fromkeys(known, 0)
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        for request in (*plan.new_requests, *plan.cached_requests):
            computed[request.request_id] = request.num_computed_tokens
        for finished in plan.finished_request_ids:
            computed[finished] = 0
        sampled: dict[str, list[int]] = {}
        for name, count in plan.num_scheduled_tokens.items():
            computed[name] += count
            if computed[name] == known[name]:
                sampled[name] = [7]
                known[name] += 1
        held = round(scheduler.stats().kv_cache_usage * num_blocks) * block_size
        states = sum(computed[name] for name in plan.num_scheduled_tokens)
        if scheduler.num_waiting:
            yield Shares(states, 0, held - states, SLOTS - held, scheduler.num_running)
        scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=sampled))


def mean(steps: Iterator[Shares]) -> tuple[list[float], float]:
    """Percent of each part over all steps, and the mean number of running requests."""
    rows = list(steps)
    percent = [100 * sum(cast(Any, row)[i] for row in rows) / len(rows) / SLOTS for i in range(4)]
    return percent, sum(row.running for row in rows) / len(rows)


def compare(lengths: Lengths, fills: int) -> dict[str, tuple[list[float], float]]:
    """Allocator -> its shares."""
    drawn = lengths.draw(round(fills * SLOTS / (lengths.mean_input + lengths.mean_output)))
    found = {
        "max": mean(run_contiguous(drawn, lambda prompt, answer: LONGEST)),
        "pow2": mean(run_contiguous(drawn, power_of_two)),
        "oracle": mean(run_contiguous(drawn, lambda prompt, answer: prompt + answer)),
    }
    for size in BLOCK_SIZES:
        found[f"octavo, blocks of {size}"] = mean(run_paged(drawn, size))
    return found


def print_table(lengths: Lengths, found: dict[str, tuple[list[float], float]]) -> None:
    print(f"\n{lengths.name}-like lengths, {SLOTS:,} token slots, {LONGEST:,} tokens a sequence at most\n")
    print("| allocator | token states | reserved | internal | external | of what requests hold: useful | running |")
    print("|---|---|---|---|---|---|---|")
    for name, (percent, running) in found.items():
        useful = 100 * percent[0] / sum(percent[:3])
        cells = " | ".join(f"{part:.1f} %" for part in percent)
        print(f"| {name} | {cells} | {useful:.1f} % | {running:.1f} |")


def draw(results: dict[str, dict[str, tuple[list[float], float]]]) -> None:
    """Stacked shares of each allocator, one panel a data set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(11, 4), sharey=True)
    for axis, (title, found) in zip(axes, results.items()):
        names = list(found)
        bottom = [0.0] * len(names)
        for part, colour in zip(range(4), ("#2a6f97", "#a9d6e5", "#f4a261", "#d9d9d9")):
            heights = [found[name][0][part] for name in names]
            axis.bar([n.replace("octavo, blocks of ", "") for n in names], heights, bottom=bottom, color=colour)
            bottom = [b + h for b, h in zip(bottom, heights)]
        axis.set_title(f"{title}-like lengths")
        axis.set_xlabel("contiguous: max, pow2, oracle; octavo: by block size")
    axes[0].set_ylabel("percent of KV memory")
    figure.legend(PARTS, loc="upper center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(PLOT, dpi=110)
    print(f"\nwrote {PLOT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("table", "plot"), default="table")
    parser.add_argument("--fills", type=int, default=FILLS, help="how often the requests would fill the memory")
    options = parser.parse_args()
    results = {lengths.name: compare(lengths, options.fills) for lengths in (SHAREGPT, ALPACA)}
    for lengths in (SHAREGPT, ALPACA):
        print_table(lengths, results[lengths.name])
    if options.what == "plot":
        draw(results)


if __name__ == "__main__":
    main()
