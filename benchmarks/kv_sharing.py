"""KV memory that sequences with one prompt share: n samples, and beams.

    python benchmarks/kv_sharing.py samples                 blocks of n = 1 .. 16 samples, beside n separate requests
    python benchmarks/kv_sharing.py figure15 [--model M]    the PagedAttention paper's figure 15, with its definition:
                                                            blocks saved by sharing / blocks without sharing
    python benchmarks/kv_sharing.py plot [--model M]        both, as docs/concepts/kv-sharing.png

Samples run through the real scheduler and block pool without a model: what they share depends on lengths alone. Which
beams survive depends on the model, so beams run through the engine, with prompts cut out of octavo's own documentation.
Nothing ends early (ignore_eos), prefix caching is off, blocks have 16 tokens; lengths are those of ``lengths.py``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lengths import ALPACA, SHAREGPT, Lengths

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.factory import make_scheduler
from octavo.core.scheduler import Scheduler
from octavo.engine.llm_engine import LLMEngine
from octavo.messages import BeamSearch, EngineCoreRequest, ModelRunnerOutput, SamplingParams, SchedulerOutput

DOCS = Path(__file__).parents[1] / "docs"
PLOT = DOCS / "concepts" / "kv-sharing.png"
BLOCK = 16
BYTES_PER_BLOCK = BLOCK * 23_040  # SmolLM2-135M, bfloat16
COUNTS = (1, 2, 4, 8, 16)
WIDTHS = (2, 4, 6)
PROMPT, ANSWER = 500, 120  # tokens, of the table of samples
PAPER = {  # percent saved at 2 .. 6 sequences (figure 15 of arXiv 2309.06180)
    ("Alpaca", "samples"): (6.1, 9.8),
    ("Alpaca", "beams"): (37.6, 55.2),
    ("ShareGPT", "samples"): (16.2, 30.5),
    ("ShareGPT", "beams"): (44.3, 66.3),
}


class Usage:
    """Blocks with and without sharing, over steps."""

    def __init__(self) -> None:
        self.peak = self.shared = self.apart = 0

    def note(self, scheduler: Scheduler) -> None:
        """Count now. Without sharing, each table's blocks would be its own."""
        pool = scheduler._kv.pool
        physical = pool.num_usable - pool.num_free
        self.peak = max(self.peak, physical)
        self.shared += physical
        self.apart += sum(block.ref_count for block in pool.blocks)

    @property
    def saved(self) -> float:
        """Percent, over all steps."""
        return 100 * (1 - self.shared / self.apart)


def request_of(name: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0)


def run_without_model(requests: Iterable[EngineCoreRequest], *, caching: bool = False) -> Usage:
    """All requests at once; every sampled token is 7."""
    config = SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=16384)
    scheduler = make_scheduler(config, CacheConfig(enable_prefix_caching=caching), 100_000, 4096)
    for request in requests:
        scheduler.add_request(request)
    usage = Usage()
    while scheduler.has_requests():
        plan = scheduler.schedule()
        usage.note(scheduler)
        scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=dict(_sevens(plan))))
    scheduler.check_invariants()
    return usage


def _sevens(plan: SchedulerOutput) -> Iterator[tuple[str, list[int]]]:
    for name in plan.num_scheduled_tokens:
        yield name, [7]
    for new in plan.new_requests:
        for name in new.siblings:
            yield name, [7]


def samples_table() -> list[tuple[int, int, int, int]]:
    """(n, peak blocks of one request with n samples, of n requests with the prefix cache, of n requests without)."""
    rows = []
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    prompt = list(range(PROMPT))
    for n in COUNTS:
        apart = [request_of(f"r{i}", prompt, params) for i in range(n)]
        together = run_without_model([request_of("r", prompt, params.replace(n=n))]).peak
        rows.append((n, together, run_without_model(apart, caching=True).peak, run_without_model(apart).peak))
    return rows


def saved_by_samples(lengths: Lengths, n: int, count: int = 200) -> float:
    """Percent of blocks saved by n samples a prompt."""
    requests = [
        request_of(f"r{i}", [i] * prompt, SamplingParams(n=n, max_tokens=answer, ignore_eos=True))
        for i, (prompt, answer) in enumerate(lengths.draw(count))
    ]
    return run_without_model(requests).saved


def saved_by_beams(engine: LLMEngine, text: list[int], lengths: Lengths, width: int, count: int) -> float:
    """Percent of blocks saved by a beam search per prompt, all at once."""
    rng = random.Random(f"{lengths.name} {width}")
    for prompt, answer in lengths.draw(count):
        start = rng.randrange(len(text) - prompt)
        params = SamplingParams(
            n=1, max_tokens=answer, ignore_eos=True, temperature=0.0, beam_search=BeamSearch(beam_width=width)
        )
        engine.add_request(text[start : start + prompt], params)
    usage, scheduler = Usage(), engine._client._core._scheduler
    while engine.has_unfinished():
        engine.step()
        usage.note(scheduler)
    engine.drain()
    engine.check_invariants()
    return usage.saved


def figure15(model: str | None, count: int, **options: Any) -> dict[tuple[str, str], list[float]]:
    """Percent saved, at 2, 4 and 6 sequences."""
    found = {(one.name, "samples"): [saved_by_samples(one, n) for n in WIDTHS] for one in (ALPACA, SHAREGPT)}
    options |= {"model": model} if model else {}
    options |= {"enable_prefix_caching": False, "max_num_seqs": 256, "max_model_len": 2048, "kv_cache_memory": "3GiB"}
    engine = LLMEngine(resolve_engine_config(engine_config_from_kwargs(**options)))
    pages = sorted(DOCS.rglob("*.md"))
    text = engine.tokenizer.encode("\n".join(page.read_text() for page in pages), add_special_tokens=False)
    for one in (ALPACA, SHAREGPT):
        found[one.name, "beams"] = []
        for width in WIDTHS:
            found[one.name, "beams"].append(saved_by_beams(engine, text, one, width, count))
            print(f"{one.name}, {width} beams: {found[one.name, 'beams'][-1]:.1f} %", file=sys.stderr, flush=True)
    engine.shutdown()
    return found


def print_samples(rows: list[tuple[int, int, int, int]]) -> None:
    print(f"Prompt of {PROMPT} tokens, answers of {ANSWER}: blocks of {BLOCK} tokens (MB of SmolLM2's KV) at most.\n")
    print("| n | one request, n samples | n requests, prefix cache | n requests, no sharing | saved |")
    print("|---|---|---|---|---|")
    for n, *blocks in rows:
        cells = [f"{count} ({count * BYTES_PER_BLOCK / 1e6:.0f} MB)" for count in blocks]
        print(f"| {n} | {' | '.join(cells)} | {1 - blocks[0] / blocks[2]:.0%} |")


def print_figure15(found: dict[tuple[str, str], list[float]]) -> None:
    for one in (ALPACA, SHAREGPT):
        drawn = one.draw(200)
        means = [sum(pair[i] for pair in drawn) / len(drawn) for i in (0, 1)]
        print(f"{one.name}-like: mean prompt {means[0]:.0f} tokens, mean answer {means[1]:.0f}")
    print("\n| lengths | sequences | " + " | ".join(str(n) for n in WIDTHS) + " | the paper's range |")
    print("|---|---|" + "---|" * (len(WIDTHS) + 1))
    for (lengths, kind), values in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] == "beams")):
        low, high = PAPER[lengths, kind]
        cells = " | ".join(f"{value:.1f} %" for value in values)
        print(f"| {lengths} | {kind} | {cells} | {low} .. {high} % |")


def draw(rows: list[tuple[int, int, int, int]], found: dict[tuple[str, str], list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    styles = ((3, "n requests, no sharing", "o-"), (2, "n requests, prefix cache", "s-"), (1, "n samples", "^--"))
    for column, label, style in styles:
        left.plot([row[0] for row in rows], [row[column] for row in rows], style, label=label)
    left.set(xlabel="n", ylabel="KV blocks, at most", xticks=COUNTS, title=f"prompt {PROMPT}, answers {ANSWER} tokens")
    left.legend()
    for place, (key, values) in enumerate(sorted(found.items(), key=lambda item: (item[0][1] == "beams", item[0][0]))):
        spots = [place + 0.25 * (i - 1) for i in range(len(values))]
        for i, (spot, value) in enumerate(zip(spots, values, strict=True)):
            right.bar(spot, value, 0.22, color=f"C{i}", label=f"{WIDTHS[i]} sequences" if place == 0 else None)
        right.vlines(place + 0.42, *PAPER[key], color="black", linewidth=2, label="the paper" if place == 0 else None)
    names = [f"{kind}\n{name}" for name, kind in sorted(found, key=lambda key: (key[1] == "beams", key[0]))]
    right.set(xticks=range(len(names)), xticklabels=names, ylabel="blocks saved, %", title="saved by sharing")
    right.legend()
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("samples", "figure15", "plot"))
    parser.add_argument("--model", help="of the beams (default: octavo's default model)")
    parser.add_argument("--count", type=int, default=24, help="prompts of each beam measurement")
    parser.add_argument("--threads", type=int, help="compute threads (default: one per core)")
    args = parser.parse_args()
    rows, found = [], {}
    if args.what != "figure15":
        rows = samples_table()
        print_samples(rows)
    if args.what != "samples":
        found = figure15(args.model, args.count, threads=args.threads)
        print_figure15(found)
    if args.what == "plot":
        draw(rows, found)


if __name__ == "__main__":
    main()
