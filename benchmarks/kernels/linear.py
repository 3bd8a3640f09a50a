"""Linear layers of SmolLM2-135M by format and rows, next to what this machine can do, measured in the same run.
K-quants get K rounded up to 256.

For each M: microseconds, GB/s of packed weights (and its share of the speed of memory), GFLOP/s (and its share of the
speed of the format's multiply-add instruction on registers). The weights are cycled through enough copies that no
cache holds them. Run it on a quiet machine: anything else on the cores falsifies it.

    python benchmarks/kernels/linear.py [--isa avx512] [--threads 2] [--formats Q4_1,bf16] [--layers down] [--rows 1,64]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from octavo.backends.cpu import _kernels

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}

# The formats of csrc/include/octavo/linear.h, and kinds of scales
F32, BF16 = 0, 1
HALF, COUNTED = 1, 2
# name: format, inputs of a group, has a minimum, kind of scales
FORMATS: dict[str, tuple[int, int, bool, int]] = {
    "f32": (F32, 0, False, 0),
    "bf16": (BF16, 0, False, 0),
    "Q8_0": (8, 32, False, HALF),
    "Q6_K": (6, 16, False, COUNTED),
    "Q5_0": (5, 32, False, HALF),
    "Q5_K": (5, 32, True, COUNTED),
    "Q4_0": (4, 32, False, HALF),
    "Q4_1": (4, 32, True, HALF),
    "Q4_K": (4, 32, True, COUNTED),
}
COLD_BYTES = 160 << 20  # several times the last-level cache's share
PEAK_ROUNDS = 500_000


def make(probe: Any, fmt: tuple[int, int, bool, int], n: int, k: int) -> None:
    """Adds a part of random weights, with scales that keep the outputs finite."""
    code, group, has_minimum, kind = fmt
    rng = np.random.default_rng(0)
    shape = _kernels.PartShape(code, n, k, group, not has_minimum, has_minimum, kind)
    if not group:
        data = rng.standard_normal(n * k, dtype=np.float32)
        data = data.view(np.uint16)[1::2].copy() if code == BF16 else data
        probe.add_part(shape, data.ctypes.data, 0, 0, 0, 0)
        return
    data = rng.integers(0, 1 << code, n * k, dtype=np.uint8)
    scale = rng.uniform(0.01, 0.1, (n, k // group)).astype(np.float16)
    if kind == COUNTED:
        scale = rng.integers(0, 64, (n, k // group), dtype=np.int8)
    unit = np.full((n, -(-k // 256)), 0.001, np.float16)
    probe.add_part(shape, data.ctypes.data, *[scale.ctypes.data] * 2, *[unit.ctypes.data] * 2)


def measure(args: argparse.Namespace, name: str, bandwidth: float) -> None:
    fmt = FORMATS[name]
    peak = 2 * _kernels.LinearProbe(args.isa, args.threads).peak(fmt[0], PEAK_ROUNDS)
    print(f"\n{name}: arithmetic peak {peak / 1e9:,.0f} GFLOP/s")
    print(f"{'layer':8} {'N':>6} {'K':>5} {'M':>4} {'us':>9} {'GB/s':>7} {'of read':>8} {'GFLOP/s':>8} {'of peak':>8}")
    for layer, (n, k) in SHAPES.items():
        if layer not in args.layers:
            continue
        if fmt[3] == COUNTED:
            k = -(-k // 256) * 256
        probe = _kernels.LinearProbe(args.isa, args.threads)
        make(probe, fmt, n, k)
        for m in args.rows:
            x = np.random.default_rng(1).standard_normal((m, k), dtype=np.float32)
            copies = max(2, min(COLD_BYTES // probe.packed_bytes, 400 // m))
            seconds = probe.time(x, copies, args.repeats)
            rate, flops = probe.packed_bytes / seconds, 2 * m * n * k / seconds
            print(
                f"{layer:8} {n:6} {k:5} {m:4} {seconds * 1e6:9.1f} {rate / 1e9:7.1f} {rate / bandwidth:8.0%} "
                f"{flops / 1e9:8.0f} {flops / peak:8.0%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="", choices=["", *_kernels.usable_isas()], help="default: the best")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--layers", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument(
        "--rows", type=lambda text: [int(m) for m in text.split(",")], default=[1, 2, 4, 8, 16, 64, 256]
    )
    args = parser.parse_args()
    bandwidth = _kernels.LinearProbe(args.isa, args.threads).read_bandwidth(512 << 20)
    isa = args.isa or _kernels.usable_isas()[0]
    print(f"{isa}, {args.threads} threads; memory reads at {bandwidth / 1e9:.1f} GB/s")
    for name in args.formats:
        measure(args, name, bandwidth)


if __name__ == "__main__":
    main()
