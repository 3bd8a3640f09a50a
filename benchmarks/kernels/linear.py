"""Linear layers of SmolLM2-135M by format and rows, next to what this machine can do, measured in the same run.

For each M: microseconds, GB/s of packed weights (and its share of the speed of memory), GFLOP/s (and its share of the
speed of the format's multiply-add instruction on registers). The weights are cycled through enough copies that no
cache holds them. Run it on a quiet machine: anything else on the cores falsifies it.

    python benchmarks/kernels/linear.py [--isa avx512] [--threads 2] [--formats i4,bf16] [--rows 1,64]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from octavo.backends.cpu import _kernels

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}
# name: code of csrc/include/octavo/linear.h, bits of a weight, inputs of a group, has a minimum, float16 scales
FORMATS: dict[str, tuple[int, int, int, bool, bool]] = {
    "f32": (0, 32, 0, False, False),
    "bf16": (1, 16, 0, False, False),
    "i8": (2, 8, 32, False, True),  # Q8_0
    "i8g16": (2, 8, 16, False, False),  # Q6_K
    "i4": (3, 4, 32, True, True),  # Q4_1
    "i4f": (3, 4, 32, True, False),  # Q4_K
}
COLD_BYTES = 160 << 20  # several times the last-level cache's share
PEAK_ROUNDS = 500_000


def make(probe: Any, fmt: tuple[int, int, int, bool, bool], n: int, k: int) -> None:
    """Adds a part of random weights, with scales that keep the outputs finite."""
    code, bits, group, has_minimum, half = fmt
    rng = np.random.default_rng(0)
    if group:
        data = rng.integers(0, 256, n * k * bits // 8, dtype=np.uint8)
        scale = rng.uniform(0.01, 0.1, (n, k // group)).astype(np.float16).astype(np.float32)
    else:
        data = rng.standard_normal(n * k, dtype=np.float32)
        data, scale = (data.view(np.uint16)[1::2].copy() if bits == 16 else data), None
    address = 0 if scale is None else scale.ctypes.data
    probe.add_part(code, n, k, group, half, data.ctypes.data, address, address if has_minimum else 0)


def measure(args: argparse.Namespace, name: str, bandwidth: float) -> None:
    fmt = FORMATS[name]
    peak = 2 * _kernels.LinearProbe(args.isa, args.threads).peak(fmt[0], PEAK_ROUNDS)
    print(f"\n{name}: {fmt[1]}-bit weights, arithmetic peak {peak / 1e9:,.0f} GFLOP/s")
    print(f"{'layer':8} {'N':>6} {'K':>5} {'M':>4} {'us':>9} {'GB/s':>7} {'of read':>8} {'GFLOP/s':>8} {'of peak':>8}")
    for layer, (n, k) in SHAPES.items():
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
