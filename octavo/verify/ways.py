"""The ways of running the same requests: alone, together, cut up, cached, preempted, restarted, speculating, threaded.

The reference is every request alone, without prefix cache, its prompt in one piece. Knows nothing of the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from octavo.config.choices import PREFIX_INDEXES
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.verify.cases import Case, make_cases, make_growing_cases, make_repeating_cases
from octavo.verify.comparison import VerifyResult, compare, count_tokens
from octavo.verify.runs import open_engine, run_cases, run_counted

OpenEngine = Callable[..., AbstractContextManager[LLMEngine]]


@dataclass(frozen=True)
class _Reference:
    """What every way is compared with: the requests, and what each of them gave alone."""

    cases: list[Case]
    expected: list[RequestOutput]
    growing: list[Case]
    grown: list[RequestOutput]
    repeating: list[Case]
    repeated: list[tuple[list[RequestOutput], int]]  # outputs, steps
    block_bytes: int
    num_kv_groups: int


def verify_model(
    model: str,
    *,
    report: Callable[[str], None],
    quick: bool = False,
    kv_cache_dtype: str = "auto",
    cache_dir: str | None = None,
) -> list[VerifyResult]:
    """Run the same requests alone, together, cut up, cached, preempted, restarted, speculating, threaded; compare bits.

    ``model`` is a path; ``report`` gets a line as each way is done. Raises ModelError if the model cannot be loaded.
    """
    start = partial(open_engine, model, kv_cache_dtype=kv_cache_dtype, cache_dir=cache_dir)
    results: list[VerifyResult] = []
    for result in _results(start, report, quick=quick):
        results.append(result)
        report(f"{'equal' if result.equal else 'DIFFERENT':10s}{result.name}: {result.detail}")
    return results


def _results(start: OpenEngine, report: Callable[[str], None], *, quick: bool) -> Iterator[VerifyResult]:
    with start() as engine:
        reference = _make_reference(engine, quick=quick)
        cases, expected = reference.cases, reference.expected
        report(f"reference: {len(cases)} requests alone, {count_tokens(expected)} tokens")
        yield compare("alone again", expected, [run_cases(engine, [case])[0] for case in cases], "no batch, no cache")
        yield compare(f"batch of {len(cases)}", expected, run_cases(engine, cases), "prompts up to 2048 tokens a step")
    for chunk in (7, 64):
        with start(long_prefill_token_threshold=chunk) as engine:
            yield compare(f"chunks of {chunk}", expected, run_cases(engine, cases), "in the batch")
    with start(max_num_batched_tokens=16) as engine:
        yield compare("16 tokens a step", expected, run_cases(engine, cases), "prompts and answers share them")
    yield from _cache_results(start, cases, expected)
    yield _preemption_result("preemption", start, reference)
    yield _preemption_result("preemption, swapped", partial(start, preemption_mode="swap", swap_space=0.25), reference)
    yield _restart_result(start, cases, expected)
    yield from _speculation_results(start, reference.repeating, reference.repeated)
    for threads in (1, 2):
        with start(threads=threads) as engine:
            yield compare(f"threads: {threads}", expected, run_cases(engine, cases), "in the batch")


def _make_reference(engine: LLMEngine, *, quick: bool) -> _Reference:
    cases = make_cases(engine.tokenizer, quick=quick)
    growing = make_growing_cases(engine.tokenizer, engine.info.block_size, quick=quick)
    repeating = make_repeating_cases(engine.tokenizer)
    return _Reference(
        cases,
        expected=[run_cases(engine, [case])[0] for case in cases],
        growing=growing,
        grown=[run_cases(engine, [case])[0] for case in growing],
        repeating=repeating,
        repeated=[run_counted(engine, [case]) for case in repeating],
        block_bytes=engine.info.kv_cache_bytes // engine.info.num_blocks,
        num_kv_groups=engine.info.num_kv_groups,
    )


def _cache_results(start: OpenEngine, cases: list[Case], expected: list[RequestOutput]) -> Iterator[VerifyResult]:
    for index in PREFIX_INDEXES:
        with start(enable_prefix_caching=True, prefix_index=index) as engine:
            for state in ("cold", "warm"):
                name, got = f"prefix cache, {index}, {state}", run_cases(engine, cases)
                cached = sum(output.num_cached_tokens for output in got)
                yield compare(name, expected, got, f"{cached} prompt tokens came from the cache")
        if cached == 0:
            yield VerifyResult(name, False, "no prompt token ever came from the cache", len(cases), 0)


def _speculation_results(
    start: OpenEngine, cases: list[Case], expected: list[tuple[list[RequestOutput], int]]
) -> Iterator[VerifyResult]:
    """All cases with drafts of five tokens, alone, then together. ``expected``: of each, outputs and steps without."""
    speculative: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 64}
    speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    with start(speculative_config=speculative, enable_prefix_caching=True) as engine:
        alone = [run_counted(engine, [case]) for case in cases]
        together = run_cases(engine, cases)
    outputs = [output for one, _ in expected for output in one]
    saved = sum(steps for _, steps in expected) - sum(steps for _, steps in alone)
    name = "speculation, alone"
    got = [output for one, _ in alone for output in one]
    result = compare(name, outputs, got, f"{saved} steps saved by what was guessed right")
    if result.equal and saved <= 0:
        result = VerifyResult(name, False, "no guess was right, so nothing is proved", len(cases), result.num_tokens)
    yield result
    yield compare("speculation, together", outputs, together, "in one batch, behind cached prompts")


def _restart_result(start: OpenEngine, cases: list[Case], expected: list[RequestOutput]) -> VerifyResult:
    """All cases again in an engine that finds on disk what another one has left there."""
    name = "restart"
    with TemporaryDirectory() as folder:
        for _ in range(2):
            with start(enable_prefix_caching=True, kv_cache_dir=folder) as engine:
                got = run_cases(engine, cases)
    cached = sum(output.num_cached_tokens for output in got)
    result = compare(name, expected, got, f"{cached} prompt tokens came from disk")
    if result.equal and cached == 0:
        return VerifyResult(name, False, "no prompt token ever came from disk", len(got), result.num_tokens)
    return result


def _preemption_result(name: str, start: OpenEngine, reference: _Reference) -> VerifyResult:
    """All cases begin in a pool that holds less than two blocks of each, so they push each other out as they grow."""
    cases = reference.growing
    blocks = (2 * len(cases) - 1) * reference.num_kv_groups
    with start(kv_cache_memory=(blocks + 1) * reference.block_bytes, max_model_len=64) as engine:
        got = run_cases(engine, cases)
    preemptions = sum(output.metrics.num_preemptions for output in got if output.metrics is not None)
    result = compare(name, reference.grown, got, f"{preemptions} times, in {blocks} blocks")
    if result.equal and preemptions == 0:
        return VerifyResult(name, False, "none happened, so nothing is proved", len(got), result.num_tokens)
    return result
