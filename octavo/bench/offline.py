"""``octavo bench latency`` and ``throughput``: the engine in this process, without HTTP.

Prompts differ in every iteration, so the prefix cache gives nothing away for free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from octavo.bench.datasets import BenchRequest, DatasetConfig, make_dataset
from octavo.exceptions import RequestError
from octavo.messages import FinishReason, SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


class Generator(Protocol):
    """What of :class:`octavo.LLM` is needed here."""

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[Any]: ...


def run_batch(llm: Generator, requests: Sequence[BenchRequest], *, detokenize: bool = True) -> tuple[float, int]:
    """(seconds, output tokens) of one generate() call. Raises RequestError if a request fails or ends early."""
    params = [
        SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=detokenize)
        for request in requests
    ]
    prompts = [list(request.prompt) for request in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    made = 0
    for request, output in zip(requests, outputs, strict=True):
        sample = output.outputs[0]
        if sample.finish_reason == FinishReason.ERROR:
            raise RequestError(f"a request failed: {sample.stop_reason}")
        if len(sample.token_ids) != request.output_len:
            raise RequestError(
                f"a request gave {len(sample.token_ids)} of {request.output_len} tokens: is --max-model-len too small?"
            )
        made += len(sample.token_ids)
    return seconds, made


def measure_latency(
    llm: Generator,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    warmups: int,
    iterations: int,
    seed: int = 0,
    vocab_size: int = 32_000,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds of a batch from its start to its last token, and what of it is the prompt's and what each token's.

    Each iteration times the same shape twice, for one token and for ``output_len``; their difference is decoding.
    """
    config = DatasetConfig(
        num_prompts=2 * batch_size * (warmups + iterations),
        seed=seed,
        vocab_size=vocab_size,
        input_len=input_len,
        output_len=output_len,
    )
    dataset = iter(make_dataset(config))
    whole, first = [], []
    for iteration in range(warmups + iterations):
        ones = [BenchRequest(next(dataset).prompt, 1) for _ in range(batch_size)]
        batch = [next(dataset) for _ in range(batch_size)]
        one = run_batch(llm, ones)[0]
        full = run_batch(llm, batch)[0]
        if iteration >= warmups:
            first.append(one)
            whole.append(full)
        on_done()
    result: dict[str, Any] = {
        "avg_latency": float(np.mean(whole)),
        "latencies": whole,
        "percentiles": {str(p): float(np.percentile(whole, p)) for p in PERCENTILES},
        "median_first_token_latency": float(np.median(first)),
        "prefill_tokens_per_second": batch_size * input_len / float(np.median(first)),
    }
    if output_len > 1:
        step = float(np.median(np.subtract(whole, first))) / (output_len - 1)
        result |= {"median_step_ms": step * 1e3, "decode_tokens_per_second": batch_size / step}
    return result


def measure_throughput(llm: Generator, dataset: Sequence[BenchRequest], *, detokenize: bool = True) -> dict[str, Any]:
    """The whole dataset in one call, after one small call that warms up."""
    first = dataset[0]
    run_batch(llm, [BenchRequest(first.prompt[::-1], min(4, first.output_len))])
    seconds, made = run_batch(llm, dataset, detokenize=detokenize)
    total = made + sum(len(request.prompt) for request in dataset)
    return {
        "elapsed_time": seconds,
        "num_requests": len(dataset),
        "total_num_tokens": total,
        "total_output_tokens": made,
        "requests_per_second": len(dataset) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": made / seconds,
    }
