"""What KV tiers save: the time to a first token after a restart, and preemption by swapping beside recomputing.

    python benchmarks/kv_tiers.py restart --model FILE     a prompt of 1,500 tokens: computed, in the pool, from disk
    python benchmarks/kv_tiers.py preempt --model FILE     more requests than the pool holds, in both modes
    python benchmarks/kv_tiers.py files                    one file a block, or several

Engines run in this process, one after the other, alternating where two are compared; the median of ``--rounds``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.engine.llm_engine import LLMEngine
from octavo.messages import SamplingParams

PROMPT_TOKENS = 1500
MIB = 2**20


def open_engine(model: str, **settings: Any) -> LLMEngine:
    return LLMEngine(
        resolve_engine_config(engine_config_from_kwargs(model=model, max_model_len=2048, **settings), None)
    )


def prompt_of(engine: LLMEngine, length: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(100, engine.info.vocab_size - 1000, length)]


def first_token(engine: LLMEngine, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Seconds to a first token; how many tokens of the prompt came from a cache; the token."""
    start = time.perf_counter()
    engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    seconds = time.perf_counter() - start
    engine.drain()
    return seconds, outputs[-1].num_cached_tokens, list(outputs[-1].outputs[0].token_ids)


def restart(model: str, rounds: int) -> None:
    """The same prompt, three ways, on one folder each round."""
    times: dict[str, list[float]] = {"computed": [], "in the pool": [], "after a restart": []}
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            engine = open_engine(model, kv_cache_dir=folder)
            prompt = prompt_of(engine, PROMPT_TOKENS, seed)
            first_token(engine, prompt_of(engine, 64, 10**6))  # code and memory are warm
            for name in ("computed", "in the pool"):
                seconds, cached, expected = first_token(engine, prompt)
                times[name].append(seconds)
            engine.shutdown()
            size = sum(path.stat().st_size for path in Path(folder).glob("*/*.kv"))
            engine = open_engine(model, kv_cache_dir=folder)
            first_token(engine, prompt_of(engine, 64, 10**6 + 1))
            seconds, cached, token = first_token(engine, prompt)
            engine.shutdown()
            assert token == expected, "another token after a restart"
            times["after a restart"].append(seconds)
    print(f"{PROMPT_TOKENS} tokens, {cached} found after a restart, {size / MIB:.0f} MiB on disk")
    for name, values in times.items():
        print(f"{name:16s} {1000 * statistics.median(values):8.1f} ms")


def preempt(model: str, rounds: int) -> None:
    """Requests that outgrow the pool while they answer; seconds and tokens computed."""
    count, length, answer = 12, 400, 200
    probe = open_engine(model, kv_cache_memory=64 * MIB)
    block_bytes = probe.info.kv_cache_bytes // probe.info.num_blocks
    prompts = [prompt_of(probe, length, seed) for seed in range(count)]
    probe.shutdown()
    blocks = count * (length // 16 + 4)  # room for all prompts, not for all answers
    results: dict[tuple[str, bool], list[tuple[float, int, int]]] = {}
    expected: list[list[int]] | None = None
    for _ in range(rounds):
        for caching in (True, False):
            for mode in ("recompute", "swap"):
                engine = open_engine(
                    model,
                    kv_cache_memory=blocks * block_bytes,
                    enable_prefix_caching=caching,
                    preemption_mode=mode,
                    swap_space=1.0 if mode == "swap" else 0.0,
                )
                start = time.perf_counter()
                computed, preemptions, tokens = run_all(engine, prompts, answer)
                results.setdefault((mode, caching), []).append((time.perf_counter() - start, computed, preemptions))
                engine.shutdown()
                assert expected in (None, tokens), "other answers"
                expected = tokens
    for (mode, caching), values in results.items():
        seconds, computed, preemptions = (statistics.median(column) for column in zip(*values, strict=True))
        cache = "prefix cache" if caching else "no prefix cache"
        print(f"{mode:10s} {cache:16s} {seconds:7.2f} s  {computed:7.0f} tokens  {preemptions:4.0f} preemptions")


def run_all(engine: LLMEngine, prompts: list[list[int]], answer: int) -> tuple[int, int, list[list[int]]]:
    """Tokens computed, preemptions, and the answers."""
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, params, request_id=str(number))
    finished, computed, step = {}, 0, engine._client.step

    def counting() -> Any:
        nonlocal computed
        outputs = step()
        computed += outputs.stats.iteration_tokens if outputs.stats else 0
        return outputs

    engine._client.step = counting  # type: ignore[method-assign]
    while engine.has_unfinished():
        finished.update({output.request_id: output for output in engine.step()})
    ordered = [finished[str(number)] for number in range(len(prompts))]
    preemptions = sum(output.metrics.num_preemptions for output in ordered if output.metrics)
    return computed, preemptions, [list(output.outputs[0].token_ids) for output in ordered]


def files(rounds: int) -> None:
    """Write and read 64 MiB of blocks of 360 KiB in files of 1, 4, 16 and 64 blocks, checked; MB/s."""
    block, count = 360 << 10, 182
    data = np.random.default_rng(0).integers(0, 256, (count, block), np.uint8)
    out = np.empty((64, block), np.uint8)
    for group in (1, 4, 16, 64):
        rates: dict[str, list[float]] = {"write": [], "read": []}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                for first in range(0, count, group):
                    part = data[first : first + group]
                    path = Path(folder) / f"{first}.partial"
                    with path.open("wb", buffering=0) as file:
                        file.write(zlib.crc32(part.data).to_bytes(4, "little"))
                        file.write(part.data)
                    os.rename(path, path.with_suffix(".kv"))
                rates["write"].append(data.nbytes / 1e6 / (time.perf_counter() - start))
                start = time.perf_counter()
                for first in range(0, count, group):
                    part = out[: min(group, count - first)]
                    with (Path(folder) / f"{first}.kv").open("rb", buffering=0) as file:
                        expected = int.from_bytes(file.read(4), "little")
                        file.readinto(part.data)
                    assert zlib.crc32(part.data) == expected
                rates["read"].append(data.nbytes / 1e6 / (time.perf_counter() - start))
        medians = {what: statistics.median(values) for what, values in rates.items()}
        print(f"{group:3d} blocks a file: write {medians['write']:6.0f}, read {medians['read']:6.0f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["restart", "preempt", "files"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.what == "files":
        files(options.rounds)
    else:
        {"restart": restart, "preempt": preempt}[options.what](options.model, options.rounds)


if __name__ == "__main__":
    main()
