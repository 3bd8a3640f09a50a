"""A19: n samples of a prompt: each its own stream of random numbers, its own end, its own index; the set repeats."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.messages import RequestOutputKind
from tests.cases.asking import answered, ask, events, refused, streamed_text
from tests.server.running_server import RunningServer

ASKED: dict[str, Any] = {
    "n": 4,
    "temperature": 1,
    "seed": 21,
    "max_tokens": 24,
    "stop_token_ids": list(range(260, 900)),
}
PROMPT = "My favourite things are"


def test_children_end_each_on_its_own(live_server: RunningServer) -> None:
    body = answered(ask(live_server, prompt=PROMPT, **ASKED, return_token_ids=True))
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    lengths = [len(choice["token_ids"]) for choice in choices]
    assert len(set(lengths)) > 1
    assert all(
        choice["finish_reason"] == ("stop" if length < 24 else "length") for choice, length in zip(choices, lengths)
    )
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 2
    assert body["usage"]["completion_tokens"] == sum(lengths)
    assert body["usage"]["prompt_tokens"] == len(choices[0]["prompt_token_ids"])
    assert answered(ask(live_server, prompt=PROMPT, **ASKED, return_token_ids=True))["choices"] == choices
    chunks = events(live_server, prompt=PROMPT, **ASKED)
    ends = Counter(choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"])
    assert ends == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [streamed_text(chunks, index) for index in range(4)] == [choice["text"] for choice in choices]


def test_a_child_is_seed_and_index(llm: LLM) -> None:
    """So the first of many is the only one of one, and asking for more changes none."""
    params = SamplingParams(temperature=1, seed=3, max_tokens=10)
    counts = (1, 2, 5)
    outputs = llm.generate([PROMPT] * 3, [params.replace(n=n) for n in counts], use_tqdm=False)
    ids = [[sample.token_ids for sample in output.outputs] for output in outputs]
    assert [len(one) for one in ids] == [1, 2, 5]
    assert ids[0] == ids[2][:1]
    assert ids[1] == ids[2][:2]
    assert len({tuple(one) for one in ids[2]}) == 5
    (other,) = llm.generate(PROMPT, params.replace(n=2, seed=4), use_tqdm=False)
    assert other.outputs[0].token_ids not in ids[2]


def test_greedy_children_are_equal(live_server: RunningServer) -> None:
    for field in ({"prompt": PROMPT}, {"prompt": PROMPT, "seed": 9}):
        body = answered(ask(live_server, **field, n=3, temperature=0, max_tokens=8))
        assert len({choice["text"] for choice in body["choices"]}) == 1
        assert body["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_come_before_samples(live_server: RunningServer, stream: bool) -> None:
    prompts = ["1, 2, 3,", "a, b, c,", "x"]
    asked: dict[str, Any] = {"n": 3, "temperature": 1, "seed": 1, "max_tokens": 7, "ignore_eos": True}
    alone = [[c["text"] for c in answered(ask(live_server, prompt=p, **asked))["choices"]] for p in prompts]
    if stream:
        chunks = events(live_server, prompt=prompts, **asked)
        texts = [streamed_text(chunks, index) for index in range(9)]
    else:
        choices = answered(ask(live_server, prompt=prompts, **asked))["choices"]
        assert [choice["index"] for choice in choices] == list(range(9))
        texts = [choice["text"] for choice in choices]
    assert texts == [text for one in alone for text in one]


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_kinds_of_output_tell_the_same(llm: LLM, kind: RequestOutputKind) -> None:
    engine = llm._live_engine()
    asked = SamplingParams(n=3, temperature=1, seed=7, max_tokens=12, stop_token_ids=list(range(260, 900)))
    (expected,) = llm.generate(PROMPT, asked, use_tqdm=False)
    engine.add_request(PROMPT, asked.replace(output_kind=kind), request_id="x")
    ids: dict[int, list[int]] = {}
    ends: Counter[int] = Counter()
    while engine.has_unfinished():
        for output in engine.step():
            for sample in output.outputs:
                known = ids.get(sample.index, []) if kind == RequestOutputKind.DELTA else []
                ids[sample.index] = known + sample.token_ids
            last = output
    ends.update(sample.index for sample in last.outputs if sample.finished)
    engine.drain()
    assert last.finished
    assert [ids[index] for index in range(3)] == [sample.token_ids for sample in expected.outputs]
    assert sum(ends.values()) == (1 if kind == RequestOutputKind.DELTA else 3)


def test_too_many(live_server: RunningServer) -> None:
    for n in (129, 10**9, 10**30):
        refused(ask(live_server, prompt="x", n=n), "n", "128", "--max-n")
    for n in (0, -1, 1.5, "2"):
        refused(ask(live_server, prompt="x", n=n), "n")


def test_the_prompt_is_counted_and_computed_once(live_server: RunningServer) -> None:
    prompt = [4000 + i for i in range(50)]
    counters = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total")
    names = [f"vllm:{name}" for name in (*counters, "request_prefill_kv_computed_tokens_sum")]
    before = [live_server.metric(name) for name in names]
    body = answered(ask(live_server, prompt=prompt, n=5, temperature=1, max_tokens=4, ignore_eos=True))
    live_server.wait_until_idle()
    after = [live_server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after)] == [50, 20, 50, 50]
    assert body["usage"]["prompt_tokens"] == 50
    assert body["usage"]["completion_tokens"] == 20


def test_abort_kills_all_children(llm: LLM) -> None:
    engine = llm._live_engine()
    for steps in (0, 1, 3):
        engine.add_request(PROMPT, SamplingParams(n=30, temperature=1, max_tokens=200, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        engine.abort_all()
        assert not engine.has_unfinished()
        engine.check_invariants()


def test_more_children_than_places(llm: LLM) -> None:
    """The engine computes 16 sequences at a time."""
    asked = SamplingParams(n=40, temperature=1, seed=9, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate(PROMPT, asked, use_tqdm=False)
    assert [sample.index for sample in output.outputs] == list(range(40))
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 30
    (few,) = llm.generate(PROMPT, asked.replace(n=3), use_tqdm=False)
    assert few.outputs == output.outputs[:3]
