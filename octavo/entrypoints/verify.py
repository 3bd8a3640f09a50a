"""Does a request get the same bits whatever else happens? Tried on a model by running the same requests many ways.

The reference is every request alone, without prefix cache, its prompt in one piece. Compared are token ids,
finish reasons and all returned logprobs, as bits: no tolerance. Knows nothing of the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.entrypoints.progress import download_bar
from octavo.messages import BeamSearch, RequestOutputKind, SamplingParams
from octavo.tokenizer.base import Tokenizer

TEXT = (
    "The river rose in the hills and ran for three days before it met the sea. Along its banks stood mills, each with "
    "a wheel of a different size; the miller of the smallest one kept a book in which he wrote, every evening, how "
    "much corn had been ground and who had brought it. On the 17th of March 1832 he noted: 'Two sacks, wet. 4 pence.' "
)
Logprobs = Sequence[dict[int, Logprob] | None]
OpenEngine = Callable[..., AbstractContextManager[LLMEngine]]
LENGTHS = (5, 16, 17, 32, 33, 48, 7, 64, 90, 128, 150, 31, 200, 3, 72, 110)
SHARED = 48  # tokens with which the longer prompts begin alike, so that the prefix cache has work


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class VerifyResult:
    """One way of running the requests, against the reference. ``detail``: what happened, or the first difference."""

    name: str
    equal: bool
    detail: str
    num_requests: int
    num_tokens: int


def make_cases(tokenizer: Tokenizer, *, quick: bool) -> list[Case]:
    """16 requests (quick: 6) of mixed lengths: greedy, seeded sampling, penalties, n = 4, beams; all with logprobs."""
    ids = tokenizer.encode(TEXT * 8, add_special_tokens=False)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 11, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    ]
    lengths = LENGTHS[:16:3] if quick else LENGTHS
    cases = []
    for number, length in enumerate(lengths):
        start = 0 if length < SHARED else SHARED + 5 * number
        prompt = (ids[:SHARED] + ids[start:])[:length]
        beams = number % 6 == 3  # of the greedy kind
        params = SamplingParams(
            **kinds[number % 3],
            n=4 if number % 6 == 1 else 1,
            beam_search=BeamSearch(beam_width=3) if beams else None,
            max_tokens=8 if quick else 24,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if number % 5 == 4 and not beams else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        cases.append(Case(prompt, params))
    return cases


@contextmanager
def _engine(model: str, **settings: Any) -> Iterator[LLMEngine]:
    base = {
        "model": model,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,  # room for every prompt in one piece
        "enable_prefix_caching": False,
    }
    engine = LLMEngine(resolve_engine_config(engine_config_from_kwargs(**base | settings), None))
    try:
        yield engine
    finally:
        engine.shutdown()


def run_cases(engine: LLMEngine, cases: Sequence[Case]) -> list[RequestOutput]:
    """All ``cases`` at once; their outputs in order."""
    return _run_counted(engine, cases)[0]


def _run_counted(engine: LLMEngine, cases: Sequence[Case]) -> tuple[list[RequestOutput], int]:
    """The outputs, and how many steps they took."""
    for number, case in enumerate(cases):
        engine.add_request(case.prompt, case.params, request_id=str(number))
    outputs, steps = {}, 0
    while engine.has_unfinished():
        outputs.update({output.request_id: output for output in engine.step()})
        steps += 1
    engine.settle()
    return [outputs[str(number)] for number in range(len(cases))], steps


def difference(expected: RequestOutput, got: RequestOutput) -> str | None:
    """Where two outputs part, or None if they agree in every bit."""
    for one, other in zip(expected.outputs, got.outputs, strict=True):
        if found := _sample_difference(one, other):
            return f"sample {one.index}: {found}" if len(expected.outputs) > 1 else found
    return _logprobs_difference("prompt", expected.prompt_logprobs, got.prompt_logprobs)


def _sample_difference(one: CompletionOutput, other: CompletionOutput) -> str | None:
    if one.finish_reason == "error" or other.finish_reason == "error":
        return f"failed: {other.stop_reason or one.stop_reason}"
    for position, (left, right) in enumerate(zip(one.token_ids, other.token_ids)):
        if left != right:
            return f"token {position} is {right}, not {left}"
    if len(one.token_ids) != len(other.token_ids) or one.finish_reason != other.finish_reason:
        return f"ended after {len(other.token_ids)} tokens ({other.finish_reason}), not {len(one.token_ids)}"
    return _logprobs_difference("output", one.logprobs, other.logprobs)


def _logprobs_difference(kind: str, ours: Logprobs | None, theirs: Logprobs | None) -> str | None:
    if len(ours or ()) != len(theirs or ()):
        return f"{len(theirs or ())} {kind} logprobs, not {len(ours or ())}"
    for position, (left, right) in enumerate(zip(ours or (), theirs or ())):
        if left != right:
            return f"{kind} logprobs at {position}: {right} instead of {left}"
    return None


def _compare(name: str, expected: list[RequestOutput], got: list[RequestOutput], note: str) -> VerifyResult:
    tokens = _num_tokens(got)
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        if found := difference(left, right):
            return VerifyResult(name, False, f"request {number}: {found}", len(got), tokens)
    return VerifyResult(name, True, note, len(got), tokens)


def _num_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)


def make_growing_cases(tokenizer: Tokenizer, block_size: int, *, quick: bool) -> list[Case]:
    """Requests that begin with one block and end with three: in a pool of less than two each, some must give way."""
    ids = tokenizer.encode(TEXT * 8, add_special_tokens=False)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=block_size + 8,
        ignore_eos=True,
        logprobs=2,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    kinds = (params, params.replace(n=2, temperature=1.0, seed=5), params, params)
    count = 4 if quick else 8
    return [Case(ids[7 * number :][: block_size - 2], kinds[number % 4]) for number in range(count)]


def make_repeating_cases(tokenizer: Tokenizer) -> list[Case]:
    """Requests whose prompts repeat themselves, so that what comes next can be guessed: greedy, penalised and drawn."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.5, "seed": 3, "n": 2},
        {"temperature": 0.0, "repetition_penalty": 1.05, "frequency_penalty": 0.1},
    ]
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    kind = RequestOutputKind.FINAL_ONLY
    return [
        Case(
            ids[number : number + 12 + 5 * number] * 4, SamplingParams(**common, **kinds[number % 3], output_kind=kind)
        )
        for number in range(6)
    ]


def verify_model(
    model: str,
    *,
    report: Callable[[str], None],
    quick: bool = False,
    kv_cache_dtype: str = "auto",
    cache_dir: str | None = None,
) -> list[VerifyResult]:
    """Run the same requests alone, together, cut up, cached, preempted, restarted, speculating, threaded; compare bits.

    ``report`` gets a line as each way is done. Raises ModelError if the model cannot be loaded.
    """
    results: list[VerifyResult] = []

    def settle(result: VerifyResult) -> None:
        results.append(result)
        report(f"{'equal' if result.equal else 'DIFFERENT':10s}{result.name}: {result.detail}")

    with download_bar() as progress:
        model = resolve_engine_config(engine_config_from_kwargs(model=model, cache_dir=cache_dir), progress).model.model
    open_engine = partial(_engine, model, kv_cache_dtype=kv_cache_dtype, cache_dir=cache_dir)
    with open_engine() as engine:
        cases = make_cases(engine.tokenizer, quick=quick)
        expected = [run_cases(engine, [case])[0] for case in cases]
        report(f"reference: {len(cases)} requests alone, {_num_tokens(expected)} tokens")
        settle(
            _compare("alone again", expected, [run_cases(engine, [case])[0] for case in cases], "no batch, no cache")
        )
        settle(
            _compare(f"batch of {len(cases)}", expected, run_cases(engine, cases), "prompts up to 2048 tokens a step")
        )
        growing = make_growing_cases(engine.tokenizer, engine.info.block_size, quick=quick)
        grown = [run_cases(engine, [case])[0] for case in growing]
        repeating = make_repeating_cases(engine.tokenizer)
        repeated = [_run_counted(engine, [case]) for case in repeating]
        block_bytes = engine.info.kv_cache_bytes // engine.info.num_blocks
        num_groups = engine.info.num_kv_groups
    for chunk in (7, 64):
        with open_engine(long_prefill_token_threshold=chunk) as engine:
            settle(_compare(f"chunks of {chunk}", expected, run_cases(engine, cases), "in the batch"))
    with open_engine(max_num_batched_tokens=16) as engine:
        settle(_compare("16 tokens a step", expected, run_cases(engine, cases), "prompts and answers share them"))
    for result in _cache_results(open_engine, cases, expected):
        settle(result)
    settle(_preemption_result("preemption", open_engine, growing, grown, block_bytes, num_groups))
    swapping = partial(open_engine, preemption_mode="swap", swap_space=0.25)
    settle(_preemption_result("preemption, swapped", swapping, growing, grown, block_bytes, num_groups))
    settle(_restart_result(open_engine, cases, expected))
    for result in _speculation_results(open_engine, repeating, repeated):
        settle(result)
    for threads in (1, 2):
        with open_engine(threads=threads) as engine:
            settle(_compare(f"threads: {threads}", expected, run_cases(engine, cases), "in the batch"))
    return results


def _cache_results(open_engine: OpenEngine, cases: list[Case], expected: list[RequestOutput]) -> Iterator[VerifyResult]:
    for index in ("hash", "radix"):
        with open_engine(enable_prefix_caching=True, prefix_index=index) as engine:
            for state in ("cold", "warm"):
                name, got = f"prefix cache, {index}, {state}", run_cases(engine, cases)
                cached = sum(output.num_cached_tokens for output in got)
                yield _compare(name, expected, got, f"{cached} prompt tokens came from the cache")
        if cached == 0:
            yield VerifyResult(name, False, "no prompt token ever came from the cache", len(cases), 0)


def _speculation_results(
    open_engine: OpenEngine, cases: list[Case], expected: list[tuple[list[RequestOutput], int]]
) -> Iterator[VerifyResult]:
    """All cases with drafts of five tokens, alone, then together. ``expected``: of each, outputs and steps without."""
    speculative: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 64}
    speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    with open_engine(speculative_config=speculative, enable_prefix_caching=True) as engine:
        alone = [_run_counted(engine, [case]) for case in cases]
        together = run_cases(engine, cases)
    outputs = [output for one, _ in expected for output in one]
    saved = sum(steps for _, steps in expected) - sum(steps for _, steps in alone)
    name = "speculation, alone"
    got = [output for one, _ in alone for output in one]
    result = _compare(name, outputs, got, f"{saved} steps saved by what was guessed right")
    if result.equal and saved <= 0:
        result = VerifyResult(name, False, "no guess was right, so nothing is proved", len(cases), result.num_tokens)
    yield result
    yield _compare("speculation, together", outputs, together, "in one batch, behind cached prompts")


def _restart_result(open_engine: OpenEngine, cases: list[Case], expected: list[RequestOutput]) -> VerifyResult:
    """All cases again in an engine that finds on disk what another one has left there."""
    name = "restart"
    with TemporaryDirectory() as folder:
        for _ in range(2):
            with open_engine(enable_prefix_caching=True, kv_cache_dir=folder) as engine:
                got = run_cases(engine, cases)
    cached = sum(output.num_cached_tokens for output in got)
    result = _compare(name, expected, got, f"{cached} prompt tokens came from disk")
    if result.equal and cached == 0:
        return VerifyResult(name, False, "no prompt token ever came from disk", len(got), result.num_tokens)
    return result


def _preemption_result(
    name: str,
    open_engine: OpenEngine,
    cases: list[Case],
    expected: list[RequestOutput],
    block_bytes: int,
    num_groups: int,
) -> VerifyResult:
    """All cases begin in a pool that holds less than two blocks of each, so they push each other out as they grow."""
    blocks = (2 * len(cases) - 1) * num_groups
    with open_engine(kv_cache_memory=(blocks + 1) * block_bytes, max_model_len=64) as engine:
        got = run_cases(engine, cases)
    preemptions = sum(output.metrics.num_preemptions for output in got if output.metrics is not None)
    result = _compare(name, expected, got, f"{preemptions} times, in {blocks} blocks")
    if result.equal and preemptions == 0:
        return VerifyResult(name, False, "none happened, so nothing is proved", len(got), result.num_tokens)
    return result
