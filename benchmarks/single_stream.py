"""One stream, octavo beside transformers on the same weights, interleaved in one run: decode and prefill tokens/s.

    python benchmarks/single_stream.py [--runs 3] [--threads 2] [--no-peer]

octavo runs the default model's GGUF file as shipped; transformers runs its dequantised weights in bfloat16 (its usual
type on a CPU) and needs the test extra.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

PREFILL, DECODE = 1024, 128


def octavo_engine(threads: int) -> Callable[[list[int], int], None]:
    from octavo import LLM, SamplingParams

    llm = LLM("smollm2-135m", threads=threads, enable_prefix_caching=False)

    def run(prompt: list[int], new_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == new_tokens

    return run


def transformers_engine(threads: int) -> Callable[[list[int], int], None]:
    import os

    import torch
    from transformers import AutoModelForCausalLM

    from octavo.catalog import resolve_model

    torch.set_num_threads(threads)
    folder, name = os.path.split(resolve_model("smollm2-135m", None, None))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16).eval()

    def run(prompt: list[int], new_tokens: int) -> None:
        with torch.inference_mode():
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )

    return run


def measure(run: Callable[[list[int], int], None], rng: random.Random) -> tuple[float, float]:
    """(prefill tokens/s, decode tokens/s); decode is the difference between a long and a one-token answer."""
    prompt = [rng.randrange(100, 40_000) for _ in range(PREFILL)]
    start = time.perf_counter()
    run(prompt, 1)
    prefill = time.perf_counter() - start
    short = prompt[:32]
    start = time.perf_counter()
    run(short, 1)
    once = time.perf_counter() - start
    start = time.perf_counter()
    run(short, 1 + DECODE)
    decode = time.perf_counter() - start - once
    return PREFILL / prefill, DECODE / decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    engines = {"octavo": octavo_engine(args.threads)}
    if not args.no_peer:
        engines["transformers bf16"] = transformers_engine(args.threads)
    rng = random.Random(0)
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for run in range(args.runs + 1):  # the first round warms up
        for name, engine in engines.items():
            figures = measure(engine, rng)
            if run:
                results[name].append(figures)
    print(f"{'':20s} {'prefill ' + str(PREFILL):>14s} {'decode':>10s}   tokens/s, median of {args.runs}")
    for name, figures_list in results.items():
        prefill, decode = (statistics.median(column) for column in zip(*figures_list))
        print(f"{name:20s} {prefill:14.0f} {decode:10.1f}")


if __name__ == "__main__":
    main()
