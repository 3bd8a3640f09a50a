"""Paged attention of three models' shapes, next to what this machine can do, measured in the same run.

Decode: one new token for each request of a batch. GB/s of keys and values read (scales included), beside the speed of
reading memory in order. Prefill: new tokens of one prompt after tokens that are known; GFLOP/s of the causal half,
beside the speed of the bf16 multiply-add instruction on registers. Blocks of a request are scattered over the pool, and
steps take turns at different blocks, so that none is left in a cache from the step before. Takes one to two minutes;
run it on a quiet machine: anything else on the cores falsifies it.

    python benchmarks/kernels/attention.py [--isa avx512] [--threads 2] [--kv int8,fp8_e4m3] [--batch 1,8]
                                           [--context 512,4096] [--shapes SmolLM2-135M]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from octavo.backends.base import Limits, StepInputs
from octavo.backends.cpu import _kernels
from octavo.backends.cpu.backend import CpuBackend, CpuRunnable
from octavo.config import BackendConfig, KVDtype
from octavo.program import Program, ProgramBuilder
from octavo.quantization.base import Weight

BLOCK = 16
VOCAB = 64
POOL_TOKENS = 1 << 18  # several times what the last-level cache holds, in one layer
FILL_TOKENS = 2048  # tokens a step writes while the cache is filled
PREFILLS = ((0, 256), (0, 2048), (7936, 256), (0, 8192))  # tokens known, and new: 256 is a step's default budget
PEAK_ROUNDS = 500_000


@dataclass(frozen=True)
class Shape:
    """Attention of one model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Qwen2.5-1.5B", 12, 2, 128), Shape("Gemma3-270M", 4, 1, 256))


def attention_program(shape: Shape) -> Program:
    """One attention over random Q, K and V."""
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    b = ProgramBuilder(vocab_size=q_size, max_position=1 << 17)
    q, k, v = b.split(b.embed(b.token_ids, "table", q_size + 2 * kv_size), q_size, kv_size, kv_size)
    out = b.attention(q, k, v, layer=0, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
    return b.finish(logits=b.rows(out, b.logit_rows))


class Bench:
    """One shape and KV type on a filled pool."""

    def __init__(self, args: argparse.Namespace, shape: Shape, kv: KVDtype) -> None:
        self.shape, self.rng = shape, np.random.default_rng(0)
        backend = CpuBackend(BackendConfig(threads=args.threads), isa=args.isa)
        blocks = POOL_TOKENS // BLOCK
        self.blocks = self.rng.permutation(np.arange(1, blocks + 1, dtype=np.int32))
        tokens = max(FILL_TOKENS, *(new for _, new in PREFILLS))
        limits = Limits(tokens, 1, FILL_TOKENS // BLOCK, blocks, blocks + 1, BLOCK, kv)
        program = attention_program(shape)
        self.token_bytes = backend.kv_bytes(program.kv_layers[0], kv)
        table = self.rng.standard_normal(program.weights["table"].shape, dtype=np.float32)
        self.runnable: CpuRunnable = backend.prepare(
            program, {"table": (Weight("float32", table.shape, table),)}, limits
        )
        for some in self.blocks.reshape(
            -1, FILL_TOKENS // BLOCK, 1
        ):  # blocks as requests of their own: cheap attention
            self.runnable.run(self.step(np.zeros(len(some), np.int64), np.full(len(some), BLOCK), some))

    def step(self, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray) -> StepInputs:
        """``counts[s]`` new tokens of each request, the first at position ``starts[s]``."""
        positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts)])
        request = np.repeat(np.arange(len(counts)), counts)
        return StepInputs(
            token_ids=self.rng.integers(0, VOCAB, len(positions), dtype=np.int32),
            positions=positions,
            slot_mapping=(tables[request, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
            query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            seq_lens=(starts + counts).astype(np.int32),
            block_tables=np.ascontiguousarray(tables, dtype=np.int32),
            logit_rows=np.zeros(1, np.int32),
        )

    def tables(self, batch: int, context: int) -> Iterator[np.ndarray]:
        """Block tables for a step, and for the next one, as far apart in the pool as may be."""
        count = batch * (context // BLOCK)
        number = 0
        while True:
            yield np.roll(self.blocks, -count * number)[:count].reshape(batch, -1)
            number += 1

    def seconds(self, batch: int, known: int, new: int, repeats: int) -> float:
        """Of a step's attention, the median of ``repeats``; each request has ``known`` tokens and gets ``new`` ones."""
        spent, tables = [], self.tables(batch, known + new)
        starts, counts = np.full(batch, known), np.full(batch, new)
        for _ in range(repeats + 1):
            step = self.step(starts, counts, next(tables))
            self.runnable.measure(True)
            self.runnable.run(step)
            spent.append(sum(seconds for name, seconds in self.runnable.measurements() if name == "attention"))
        return float(np.median(spent[1:]))


def measure_decode(args: argparse.Namespace, bench: Bench, memory: float) -> None:
    print(f"  {'decode':8} {'batch':>5} {'context':>8} {'us':>9} {'GB/s':>8} {'of memory':>10}")
    for batch in args.batch:
        for context in args.context:
            if batch * context > POOL_TOKENS:
                continue
            repeats = max(5, min(40, (1 << 19) // (batch * context)))
            seconds = bench.seconds(batch, context - 1, 1, repeats)
            rate = bench.token_bytes * batch * context / seconds
            print(
                f"  {'':8} {batch:5} {context:8} {seconds * 1e6:9.1f} {rate / 1e9:8.1f} {rate / memory:10.0%}",
                flush=True,
            )


def measure_prefill(bench: Bench, peak: float) -> None:
    print(f"  {'prefill':8} {'new':>5} {'known':>8} {'us':>9} {'GFLOP/s':>8} {'of peak':>10}")
    for known, new in PREFILLS:
        seconds = bench.seconds(1, known, new, 3 if new > 4096 else 7)
        pairs = new * known + new * (new + 1) // 2
        flops = 4 * bench.shape.heads * bench.shape.head_dim * pairs / seconds
        print(f"  {'':8} {new:5} {known:8} {seconds * 1e6:9.1f} {flops / 1e9:8.0f} {flops / peak:10.0%}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [kind for kind in get_args(KVDtype) if kind != "auto"]
    parser.add_argument("--isa", default="", choices=["", *_kernels.usable_isas()], help="default: the best")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", type=lambda text: text.split(","), default=kinds)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=[shape.name for shape in SHAPES])
    parser.add_argument("--batch", type=numbers, default=[1, 8, 64])
    parser.add_argument("--context", type=numbers, default=[512, 4096, 32768], help="multiples of 16")
    args = parser.parse_args()
    print(f"{args.isa or _kernels.usable_isas()[0]}, {args.threads} threads")
    for shape in (shape for shape in SHAPES if shape.name in args.shapes):
        for kv in args.kv:
            bench, probe = Bench(args, shape, kv), _kernels.LinearProbe(args.isa, args.threads)
            memory, peak = max(probe.read_bandwidth(512 << 20) for _ in range(3)), 2 * probe.peak(1, PEAK_ROUNDS)
            print(f"\n{shape.name}: {shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}, KV in {kv}")
            print(f"  reads of memory {memory / 1e9:.1f} GB/s, bf16 peak {peak / 1e9:,.0f} GFLOP/s")
            measure_decode(args, bench, memory)
            measure_prefill(bench, peak)


if __name__ == "__main__":
    main()
