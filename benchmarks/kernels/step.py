"""Where the time of a step goes: milliseconds by phase, and the share of the instruction's peak that linears reach.

For each batch one token of so many requests with 256 tokens behind them, for each prompt a step of so many tokens. A
phase's time is the least of all rounds, the wait for the other threads included.

    python benchmarks/kernels/step.py smollm2-135m [--threads 1] [--batches 1,8,32,64] [--prompts 1024] [--rounds 20]
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np

from octavo.backends.base import Limits, StepInputs
from octavo.backends.cpu import _kernels
from octavo.backends.cpu.backend import CpuBackend, CpuRunnable
from octavo.catalog import resolve_model
from octavo.config import BackendConfig, ModelConfig
from octavo.model_loader import load_model
from octavo.program import Program

BLOCK, CONTEXT, INT16 = 16, 256, 4


def inputs(requests: int, start: int, tokens: int, vocab: int, limits: Limits) -> StepInputs:
    """``tokens`` random tokens of each of ``requests``, the first at position ``start``."""
    per_request = -(-(start + tokens) // BLOCK)
    tables = np.zeros((requests, limits.max_blocks_per_seq), np.int32)
    tables[:, :per_request] = 1 + np.arange(requests * per_request).reshape(requests, -1)
    positions = np.tile(np.arange(start, start + tokens), requests)
    owner = np.repeat(np.arange(requests), tokens)
    slots = tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    starts = np.arange(requests + 1) * tokens
    ids = np.random.default_rng(0).integers(0, vocab, positions.size)
    lengths = np.full(requests, start + tokens)
    flat = [array.astype(np.int32) for array in (ids, positions, slots, starts, lengths)]
    return StepInputs(*flat, tables, (starts[1:] - 1).astype(np.int32))


def linears(program: Program) -> list[tuple[str, int]]:
    """Of each linear in order: what is left of its name without the layer's number, and its multiply-adds a row."""
    names = [op.weights["weight"] for op in program.ops if op.kind == "linear"]
    shapes = [program.weights[name].shape for name in names]
    return [(name.rpartition(".")[2], shape[0] * shape[1]) for name, shape in zip(names, shapes)]


def profile(runnable: CpuRunnable, program: Program, step: StepInputs, rounds: int, peak: float) -> None:
    least: list[float] = []
    names: list[str] = []
    for _ in range(rounds):
        runnable.measure()
        runnable.run(step)
        names, times = map(list, zip(*runnable.measurements()))  # type: ignore[assignment]
        least = [min(pair) for pair in zip(least, times)] if least else times
    rows, order = step.token_ids.size, iter(linears(program))
    seconds: dict[str, float] = defaultdict(float)
    work: dict[str, int] = defaultdict(int)
    for name, time in zip(names, least):
        label = name
        if name.startswith("linear"):
            label, products = next(order)
            work[label] += products * (step.logit_rows.size if label == linears(program)[-1][0] else rows)
        seconds[label] += time
    print(f"{rows} tokens of {step.seq_lens.size} requests: {sum(least) * 1e3:.2f} ms")
    for label, time in sorted(seconds.items(), key=lambda item: -item[1]):
        share = f"{2 * work[label] / time / peak:6.0%} of the peak" if work[label] else ""
        print(f"  {time * 1e3:9.3f} ms {time / sum(least):6.1%}  {label:32} {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="catalogue name, GGUF file or folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    for name, default in (("--batches", [1, 8, 32, 64]), ("--prompts", [1024])):
        parser.add_argument(name, type=lambda text: [int(n) for n in text.split(",") if n], default=default)
    args = parser.parse_args()
    model = load_model(ModelConfig(model=resolve_model(args.model, None, None)))
    most, requests = max([1, *args.prompts, *args.batches]), max([1, *args.batches])
    per_request = -(-max(most, CONTEXT + 1) // BLOCK)
    limits = Limits(most, requests, requests, per_request, 2 + max(requests, 1) * per_request, BLOCK)
    runnable = CpuBackend(BackendConfig(threads=args.threads)).prepare(model.program, model.weights, limits)
    peak = 2 * _kernels.LinearProbe("", args.threads).peak(INT16, 500_000)
    print(f"{args.threads} threads; int16 peak {peak / 1e9:.0f} GFLOP/s")
    vocab = model.program.vocab_size
    for batch in args.batches:
        profile(runnable, model.program, inputs(batch, CONTEXT, 1, vocab, limits), args.rounds, peak)
    for tokens in args.prompts:
        profile(runnable, model.program, inputs(1, 0, tokens, vocab, limits), max(2, args.rounds // 4), peak)


if __name__ == "__main__":
    main()
