"""Text, stop strings, kinds of output, n samples and logprobs, through the real engine in process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.engine.live_request import LiveRequest
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.messages import RequestOutputKind, SamplingParams

PROMPT = "the quick brown"


def run(engine: LLMEngine, *requests: tuple[str, SamplingParams]) -> list[list[RequestOutput]]:
    """All outputs of each request."""
    lives = [engine.add_request(prompt, params) for prompt, params in requests]
    return collect(engine, lives)


def collect(engine: LLMEngine, lives: list[LiveRequest]) -> list[list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {live.request_id: [] for live in lives}
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id].append(output)
    engine.drain()
    engine.check_invariants()
    return [found[live.request_id] for live in lives]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | changes))


def test_the_three_kinds_tell_the_same(tiny_engine: LLMEngine) -> None:
    kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
    requests = [(PROMPT, params(output_kind=kind, logprobs=2)) for kind in kinds]
    cumulative, deltas, final = run(tiny_engine, *requests)
    assert len(final) == 1
    last, end = final[0].outputs[0], cumulative[-1].outputs[0]
    assert len(last.token_ids) == 24
    assert last.finish_reason == "length"
    tokenizer = tiny_engine.tokenizer
    assert last.text == end.text == "".join(o.outputs[0].text for o in deltas) == tokenizer.decode(last.token_ids)
    assert last.token_ids == end.token_ids == [t for o in deltas for t in o.outputs[0].token_ids]
    assert last.logprobs == end.logprobs == [m for o in deltas for m in o.outputs[0].logprobs or []]
    assert [len(o.outputs[0].token_ids) for o in cumulative] == list(range(1, 25))
    assert [o.finished for o in deltas] == [False] * 23 + [True]
    assert final[0].prompt == PROMPT
    assert final[0].prompt_token_ids == tokenizer.encode(PROMPT)


def test_logprobs(tiny_engine: LLMEngine) -> None:
    (final,) = run(
        tiny_engine, (PROMPT, params(logprobs=3, prompt_logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY))
    )
    sample = final[0].outputs[0]
    assert sample.logprobs is not None
    assert len(sample.logprobs) == 24
    for token_id, entry in zip(sample.token_ids, sample.logprobs):
        assert next(iter(entry)) == token_id
        assert [e.rank for e in entry.values()] == [1, 2, 3]  # greedy: the token itself is the first of the three
        assert entry[token_id].decoded_token == tiny_engine.tokenizer.decode([token_id], skip_special_tokens=False)
    total = math.fsum(entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs))
    assert sample.cumulative_logprob == pytest.approx(total)
    prompt_logprobs = final[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    assert len(prompt_logprobs) == len(final[0].prompt_token_ids)
    for token_id, prompt_entry in zip(final[0].prompt_token_ids[1:], prompt_logprobs[1:]):
        assert prompt_entry is not None
        assert token_id in prompt_entry


def test_prompt_logprobs_come_once_with_deltas(tiny_engine: LLMEngine) -> None:
    (deltas,) = run(tiny_engine, (PROMPT, params(prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)))
    assert [output.prompt_logprobs is not None for output in deltas] == [True] + [False] * 23


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_text_and_sequence(tiny_engine: LLMEngine, kind: RequestOutputKind, include: bool) -> None:
    full = run(tiny_engine, (PROMPT, params(max_tokens=60)))[0][-1].outputs[0]
    stop = full.text[11:14]  # wherever that falls among the tokens
    changes = {"stop": ["never!", stop], "include_stop_str_in_output": include, "output_kind": kind, "max_tokens": 60}
    (outputs,) = run(tiny_engine, (PROMPT, params(**changes)))
    text = outputs[-1].outputs[0].text
    if kind == RequestOutputKind.DELTA:
        text = "".join(output.outputs[0].text for output in outputs)
    end = full.text.index(stop) + (len(stop) if include else 0)
    assert text == full.text[:end]
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason == stop


def test_a_stop_token_is_no_part_of_the_text(tiny_engine: LLMEngine) -> None:
    full = run(tiny_engine, (PROMPT, params()))[0][-1].outputs[0]
    stop = full.token_ids[-1]
    at = full.token_ids.index(stop)
    for include in (False, True):
        (outputs,) = run(tiny_engine, (PROMPT, params(stop_token_ids=[stop], include_stop_str_in_output=include)))
        sample = outputs[-1].outputs[0]
        assert sample.token_ids == full.token_ids[: at + 1]
        assert sample.text == tiny_engine.tokenizer.decode(full.token_ids[: at + include])
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_three_samples_of_one_prompt(tiny_engine: LLMEngine, kind: RequestOutputKind) -> None:
    wanted = params(n=3, temperature=1.0, seed=7, output_kind=kind)
    (outputs,) = run(tiny_engine, (PROMPT, wanted))
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    reasons = {}
    for output in outputs:
        indices = [sample.index for sample in output.outputs]
        assert indices == sorted(set(indices))
        for sample in output.outputs:
            delta = kind == RequestOutputKind.DELTA
            texts[sample.index] = texts[sample.index] + sample.token_ids if delta else sample.token_ids
            reasons[sample.index] = sample.finish_reason
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {index: len(ids) for index, ids in texts.items()} == {0: 24, 1: 24, 2: 24}
    assert len({tuple(ids) for ids in texts.values()}) == 3
    assert set(reasons.values()) == {"length"}
    (again,) = run(tiny_engine, (PROMPT, wanted.replace(output_kind=RequestOutputKind.FINAL_ONLY)))
    assert len(again) == 1
    assert {sample.index: sample.token_ids for sample in again[0].outputs} == texts


def test_each_sample_ends_on_its_own(tiny_engine: LLMEngine) -> None:
    wanted = params(n=3, temperature=1.0, seed=7)
    samples = run(tiny_engine, (PROMPT, wanted))[0][-1].outputs
    stop = samples[1].token_ids[1]
    (outputs,) = run(tiny_engine, (PROMPT, wanted.replace(stop_token_ids=[stop])))
    for before, after in zip(samples, outputs[-1].outputs):
        end = before.token_ids.index(stop) + 1 if stop in before.token_ids else 24
        assert after.token_ids == before.token_ids[:end]
        assert after.finish_reason == ("stop" if stop in before.token_ids else "length")
    assert outputs[-1].outputs[1].finish_reason == "stop"


def test_a_detokenizer_that_fails_ends_one_request(
    tiny_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lives = [tiny_engine.add_request(PROMPT, params()) for _ in range(3)]
    broken = tiny_engine._output._samples[lives[1].core_ids[0]]
    monkeypatch.setattr(broken.detokenizer, "update", lambda ids, finished: 1 // 0)
    outputs = collect(tiny_engine, lives)
    assert outputs[1][-1].outputs[0].finish_reason == "error"
    message = str(outputs[1][-1].outputs[0].stop_reason)
    assert "division" not in message  # the client learns an id,
    (line,) = [record.getMessage() for record in caplog.records]
    assert message.partition("error id ")[2].rstrip(")") in line
    assert "ZeroDivisionError" in line  # the log the cause
    assert lives[1].request_id in line
    for fine in (outputs[0], outputs[2]):
        assert fine[-1].outputs[0].finish_reason == "length"
        assert len(fine[-1].outputs[0].token_ids) == 24


def test_cached_tokens_are_told(tiny_engine: LLMEngine) -> None:
    long = PROMPT * 12
    first, second = (run(tiny_engine, (long, params()))[0] for _ in range(2))
    assert first[-1].num_cached_tokens == 0
    length = len(second[-1].prompt_token_ids)
    assert second[-1].num_cached_tokens == (length - 1) // 16 * 16 > 0
    assert first[-1].outputs[0].token_ids == second[-1].outputs[0].token_ids


def test_times_are_in_order(tiny_engine: LLMEngine) -> None:
    metrics = run(tiny_engine, (PROMPT, params()))[0][-1].metrics
    assert metrics is not None
    times = [metrics.arrival_time, metrics.queued_time, metrics.scheduled_time]
    times += [metrics.first_token_time, metrics.last_token_time]
    assert times == sorted(times)  # type: ignore[type-var]
