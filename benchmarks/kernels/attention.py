"""Paged attention of two models' shapes, next to what this machine can do, measured in the same run.

Decode: one new token for each request of a batch. GB/s of keys and values read (scales included), beside the speed of
reading memory, or the last-level cache where keys and values of all layers fit into it. Prefill: one prompt; GFLOP/s of
the causal half, beside the speed of the bf16 multiply-add instruction on registers. Small cases use as many layers as
the model has, so that no layer's keys stay in a core's own cache. Blocks of a request are scattered over the pool.
Run it on a quiet machine: anything else on the cores falsifies it.

    python benchmarks/kernels/attention.py [--isa avx512] [--threads 2] [--kv int8] [--batch 1,8] [--context 512,8192]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from octavo.backends.base import Limits, StepInputs
from octavo.backends.cpu import _kernels
from octavo.backends.cpu.backend import CpuBackend, CpuRunnable
from octavo.config import BackendConfig
from octavo.program import Program, ProgramBuilder
from octavo.quantization.base import Weight

BLOCK = 16
VOCAB = 64
FILL_TOKENS = 2048  # tokens a step writes while the cache is filled
ENOUGH_BYTES = 256 << 20  # of keys and values: several times the last-level cache
CACHE_BYTES = 8 << 20  # what is read to measure the last-level cache: beyond the cores' own caches, far within it
LAST_LEVEL = 32 << 20
PEAK_ROUNDS = 500_000


@dataclass(frozen=True)
class Shape:
    """Attention of one model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


SHAPES = (Shape("SmolLM2-135M", 9, 3, 64, 30), Shape("Qwen2.5-1.5B", 12, 2, 128, 28))


def attention_program(shape: Shape, layers: int) -> Program:
    """``layers`` attentions over the same random Q, K and V."""
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    b = ProgramBuilder(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=q_size,
        max_position=1 << 17,
    )
    q, k, v = b.split(b.embed(b.token_ids, "table", q_size + 2 * kv_size), q_size, kv_size, kv_size)
    outputs = [b.attention(q, k, v, layer=layer) for layer in range(layers)]
    return b.finish(logits=b.rows(outputs[-1], b.logit_rows))


class Bench:
    """One shape and KV type on one pool that holds ``batch`` requests of ``context`` tokens."""

    def __init__(self, args: argparse.Namespace, shape: Shape, kv: str, batch: int, context: int) -> None:
        self.shape, self.batch, self.context = shape, batch, context
        per_head = 2 * shape.head_dim if kv == "bfloat16" else shape.head_dim + 4
        self.layer_bytes = 2 * shape.kv_heads * per_head * batch * context  # keys and values of one layer
        self.layers = max(1, min(shape.layers, ENOUGH_BYTES // self.layer_bytes))
        blocks = batch * (context // BLOCK)
        self.rng = np.random.default_rng(0)
        self.tables = self.rng.permutation(np.arange(1, blocks + 1, dtype=np.int32)).reshape(batch, -1)
        tokens = max(context, FILL_TOKENS, batch)
        seqs = max(batch, FILL_TOKENS // BLOCK)
        limits = Limits(tokens, 1, seqs, self.tables.shape[1], blocks + 1, BLOCK, kv)
        backend = CpuBackend(BackendConfig(threads=args.threads), isa=args.isa)
        program = attention_program(shape, self.layers)
        table = self.rng.standard_normal(program.weights["table"].shape, dtype=np.float32)
        self.runnable: CpuRunnable = backend.prepare(
            program, {"table": (Weight("float32", table.shape, table),)}, limits
        )

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

    def fill(self) -> None:
        """Writes every slot: each block as a request of its own, which makes attention cheap."""
        flat = self.tables.reshape(-1, 1)
        for first in range(0, len(flat), FILL_TOKENS // BLOCK):
            some = flat[first : first + FILL_TOKENS // BLOCK]
            self.runnable.run(self.step(np.zeros(len(some), np.int64), np.full(len(some), BLOCK), some))

    def seconds(self, step: StepInputs, repeats: int) -> float:
        """Of one layer's attention, the median of ``repeats`` steps."""
        spent = []
        for _ in range(repeats):
            self.runnable.measure(True)
            self.runnable.run(step)
            spent.append(sum(seconds for name, seconds in self.runnable.measurements() if name == "attention"))
        return float(np.median(spent)) / self.layers

    def decode_seconds(self, repeats: int) -> float:
        self.fill()
        ones = np.ones(self.batch, np.int64)
        return self.seconds(self.step(ones * (self.context - 1), ones, self.tables), repeats)

    def prefill_seconds(self, repeats: int) -> float:
        return self.seconds(self.step(np.zeros(1, np.int64), np.array([self.context]), self.tables[:1]), repeats)


def measure_decode(args: argparse.Namespace, shape: Shape, kv: str, memory: float, cache: float) -> None:
    print(f"{'decode':8} {'batch':>5} {'context':>7} {'layers':>6} {'us/layer':>9} {'GB/s':>7} {'share':>6}")
    for batch in args.batch:
        for context in args.context:
            bench = Bench(args, shape, kv, batch, context)
            seconds = bench.decode_seconds(args.repeats)
            rate = bench.layer_bytes / seconds
            fits = bench.layer_bytes * bench.layers < LAST_LEVEL // 2
            ceiling, name = (cache, "L3") if fits else (memory, "memory")
            print(
                f"{'':8} {batch:5} {context:7} {bench.layers:6} {seconds * 1e6:9.1f} {rate / 1e9:7.1f} "
                f"{rate / ceiling:6.0%} of {name}",
                flush=True,
            )


def measure_prefill(args: argparse.Namespace, shape: Shape, kv: str, peak: float) -> None:
    print(f"{'prefill':8} {'tokens':>7} {'ms/layer':>9} {'GFLOP/s':>8} {'of peak':>8}")
    for tokens in args.prefill:
        bench = Bench(args, shape, kv, 1, tokens)
        seconds = bench.prefill_seconds(max(2, args.repeats // 2))
        flops = 4 * shape.heads * shape.head_dim * (tokens * (tokens + 1) // 2) / seconds
        print(f"{'':8} {tokens:7} {seconds * 1e3:9.3f} {flops / 1e9:8.0f} {flops / peak:8.0%}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="", choices=["", *_kernels.usable_isas()], help="default: the best")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kv", type=lambda text: text.split(","), default=["bfloat16", "int8"])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=[shape.name for shape in SHAPES])
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument("--context", type=numbers, default=[512, 2048, 8192, 32768])
    parser.add_argument("--prefill", type=numbers, default=[512, 2048, 8192])
    args = parser.parse_args()
    probe = _kernels.LinearProbe(args.isa, args.threads)
    memory, cache = probe.read_bandwidth(512 << 20), probe.read_bandwidth(CACHE_BYTES)
    peak = 2 * probe.peak(1, PEAK_ROUNDS)
    print(f"{args.isa or _kernels.usable_isas()[0]}, {args.threads} threads; bf16 peak {peak / 1e9:,.0f} GFLOP/s")
    print(f"reads of memory {memory / 1e9:.1f} GB/s, of the last-level cache {cache / 1e9:.1f} GB/s")
    for shape in SHAPES:
        for kv in args.kv if shape.name in args.shapes else ():
            print(f"\n{shape.name}: {shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}, KV in {kv}")
            measure_decode(args, shape, kv, memory, cache)
            measure_prefill(args, shape, kv, peak)


if __name__ == "__main__":
    main()
