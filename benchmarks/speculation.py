"""Tokens per second with n-gram speculation and without, where answers repeat their prompts and where they do not.

    python benchmarks/speculation.py [--model M] [--streams 1 2] [--rounds 3] [--threads 2]

Both engines are loaded, and take turns. ``edit``: a function to be written down again with one name changed; ``quote``:
passages to be repeated; ``story``: free text. Greedy, 128 tokens. Answers must be equal, else it stops.
CPU time counts all threads, also those that wait: it is of use with ``--threads 1``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.engine.llm_engine import LLMEngine
from octavo.messages import RequestOutputKind, SamplingParams

CODE = """def total(rows, column, default=0):
    result = default
    for row in rows:
        if column in row:
            result += row[column]
        else:
            result += default
    return result
"""
PASSAGES = (
    "The lighthouse was built in 1871 of granite from the quarry at the north end of the bay.",
    "Its lamp burned colza oil until 1904, and was seen from a distance of nineteen nautical miles.",
    "The keeper's log of the winter of 1893 tells of eleven ships that waited for a week behind the cape.",
)
ASKED = {
    "edit": f"Rewrite this Python function with `result` renamed to `value`. Change nothing else.\n\n{CODE}",
    "quote": "Passages:\n" + "\n".join(PASSAGES) + "\n\nRepeat all passages word for word.",
    "story": "Tell a long story about a fox who wanted to learn how to swim.",
}


class Run(NamedTuple):
    """One answer of each stream."""

    seconds: float
    cpu: float
    steps: int
    answers: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


def run(engine: LLMEngine, prompt: list[int], streams: int) -> Run:
    """``streams`` requests, whose prompts differ in what precedes them; the time from the first token on."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    for stream in range(streams):
        engine.add_request([prompt[0], *prompt[1 : 1 + stream], *prompt], params, request_id=str(stream))
    done: dict[str, list[int]] = {}
    engine.step()
    seconds, cpu, steps = time.perf_counter(), time.process_time(), 0
    while engine.has_unfinished():
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        steps += 1
    seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
    engine.drain()
    return Run(seconds, cpu, steps, [done[str(stream)] for stream in range(streams)])


def compare(engines: dict[str, LLMEngine], kind: str, streams: int, rounds: int) -> None:
    """Print one line."""
    tokenizer = engines["plain"].tokenizer
    messages = [{"role": "user", "content": ASKED[kind]}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for _ in range(rounds + 1):  # the first one is warm-up
        for name, engine in engines.items():
            runs[name].append(run(engine, prompt, streams))
    if any(one.answers != runs["plain"][0].answers for several in runs.values() for one in several):
        sys.exit(f"{kind}: answers differ")
    speed = {n: statistics.median(one.num_tokens / one.seconds for one in several[1:]) for n, several in runs.items()}
    cost = {n: statistics.median(1e3 * one.cpu / one.num_tokens for one in several[1:]) for n, several in runs.items()}
    saved = runs["plain"][0].steps / runs["ngram"][0].steps
    print(
        f"{kind:6} {streams:3} streams   tok/s {speed['plain']:7.1f} -> {speed['ngram']:7.1f} "
        f"({speed['ngram'] / speed['plain']:.2f})   CPU ms a token {cost['plain']:6.2f} -> {cost['ngram']:6.2f} "
        f"({cost['plain'] / cost['ngram']:.2f})   steps saved: {saved:.2f} x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache-dir")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--disable-by-batch-size", type=int, default=2)
    args = parser.parse_args()
    common: dict[str, Any] = {"model": args.model, "cache_dir": args.cache_dir, "threads": args.threads}
    common |= {"max_model_len": 2048, "max_num_seqs": 16, "kv_cache_memory": "512MiB"}
    speculative = {"method": "ngram", "num_speculative_tokens": args.num_speculative_tokens}
    speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "disable_by_batch_size": args.disable_by_batch_size}
    settings: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"speculative_config": speculative}}
    engines = {
        name: LLMEngine(resolve_engine_config(engine_config_from_kwargs(**common, **extra)))
        for name, extra in settings.items()
    }
    for streams in args.streams:
        for kind in ASKED:
            compare(engines, kind, streams, args.rounds)
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
