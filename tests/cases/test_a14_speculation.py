"""A14: n-gram speculation changes no token and no log-probability, whatever is asked, and breaks no grammar."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.exceptions import ConfigError
from octavo.messages import StructuredOutputsParams
from tests.cases.asking import answered, ask, events, streamed_text
from tests.cases.conftest import MAX_MODEL_LEN, POOL
from tests.server.running_server import RunningServer, running_server

SPECULATIVE: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
    "disable_by_batch_size": 16,
}
THINGS = (
    "apple",
    "copper wire",
    "x1 = x0 + 1;",
    "To be, or not to be,",
    "{'id': 7}",
    "ab",
    "Ünïcødé ☂",
    "0110",
    "\n\t-",
    "la",
)
PROMPTS = [f"{thing} " * (4 + at) for at, thing in enumerate(THINGS)]
PROMPTS += [f"Copy: {thing}, one. {thing}, two. {thing}, three. Copy: {thing}, one. {thing}," for thing in THINGS]
SCHEMA = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 9}},
    "required": ["rows"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["two", "e", "0", "la la"], "ignore_eos": False},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": list(range(260, 2000)), "ignore_eos": False},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 2},
    "logit_bias": {"logit_bias": {28: 4.0, 30: -100.0}},
    "bad_words": {"bad_words": ["one", "to be"]},
    "seeds": {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    "samples": {"temperature": 1.0, "n": 2, "logprobs": 0},
    "json": {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 48, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def speculating(smollm2_path: str) -> Iterator[LLM]:
    with LLM(
        smollm2_path,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory=POOL,
        max_num_seqs=16,
        threads=1,
        speculative_config=SPECULATIVE,
    ) as one:
        yield one


def run(llm: LLM, fields: dict[str, Any]) -> tuple[list[RequestOutput], int]:
    """The answers to all prompts, and how many of their tokens were guessed right.

    A step gives a sequence one token, and one more for each right guess. That, not a count of steps, tells what
    speculation did: there are also steps that wait for grammars, as many as the machine is slow.
    """
    engine, right = llm._live_engine(), 0
    for at, prompt in enumerate(PROMPTS):
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "seed": at} | fields))
        engine.add_request(prompt, params, request_id=str(at))
    done: dict[str, RequestOutput] = {}
    lengths: dict[tuple[str, int], int] = defaultdict(int)  # by request and sample
    while engine.has_unfinished():
        for output in engine.step():
            done[output.request_id] = output
            for sample in output.outputs:
                place = output.request_id, sample.index
                right += max(0, len(sample.token_ids) - lengths[place] - 1)
                lengths[place] = len(sample.token_ids)
    engine.drain()
    engine.check_invariants()
    return [done[str(at)] for at in range(len(PROMPTS))], right


@pytest.mark.parametrize("asked", ASKED)
def test_nobody_can_tell(llm: LLM, speculating: LLM, asked: str) -> None:
    plain, unguessed = run(llm, ASKED[asked])
    found, right = run(speculating, ASKED[asked])
    for one, other in zip(plain, found, strict=True):
        assert other.outputs == one.outputs  # text, ids, every bit of every logprob, and how it ended
    assert unguessed == 0
    assert right > 0 or asked in ("seeds", "samples")  # or nothing is shown
    if asked == "json":
        ended = [sample for output in found for sample in output.outputs if sample.finish_reason == "stop"]
        assert len(ended) > 5
        assert all(6 <= len(json.loads(sample.text)["rows"]) <= 9 for sample in ended)


def test_over_http(smollm2_path: str, live_server: RunningServer) -> None:
    """Usage, streams and json_object beside a server without; and the metrics add up."""
    flags = ["--served-model-name", "smollm2", "--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory", POOL]
    bodies: list[dict[str, Any]] = [
        {"prompt": PROMPTS[3], "max_tokens": 24, "temperature": 0, "stop": ["be, or", "not to be, or"]},
        {"prompt": PROMPTS[13], "max_tokens": 24, "temperature": 0, "logprobs": 2},
        {"prompt": PROMPTS[0:3], "max_tokens": 10, "temperature": 0, "echo": True, "n": 2},
        {"prompt": PROMPTS[4], "max_tokens": 24, "temperature": 0, "response_format": {"type": "json_object"}},
    ]
    with running_server(smollm2_path, *flags, "--speculative-config", json.dumps(SPECULATIVE)) as server:
        server.wait_until_ready()
        before = server.metric("vllm:generation_tokens_total")
        sent = 0
        for body in bodies:
            expected, found = (answered(ask(one, **body)) for one in (live_server, server))
            assert found["choices"] == expected["choices"]
            assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
            sent += found["usage"]["completion_tokens"]
            for index in range(len(found["choices"])):
                assert streamed_text(events(server, **body), index) == expected["choices"][index]["text"]
                sent += found["usage"]["completion_tokens"]
        server.wait_until_idle()
        drafts, tried, right = (
            server.metric(f"vllm:spec_decode_num_{name}_total")
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        assert server.metric("vllm:generation_tokens_total") - before == sent
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert 0 < drafts <= tried <= 4 * drafts
    assert 0 < right <= tried


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "eagle", "num_speculative_tokens": 2}, "method = 'eagle': must be ngram"),
        ({"method": "ngram"}, "lacks num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens = 0: must be 1..64"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens = '4': must be int"),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "1..2"),
        ({"method": "ngram", "num_speculative_tokens": 4, "draft": "x"}, "no key 'draft'; known are method"),
        ("ngram", "'ngram' is not JSON"),
        ([], "must be SpeculativeConfig"),
    ],
)
def test_what_is_not_there_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"ngram|speculative_config") as caught:
        LLM("nothing", speculative_config=config)
    assert words in str(caught.value)


def test_it_takes_one_step_in_flight() -> None:
    with pytest.raises(ConfigError, match="pipeline_depth = 2: must be 1 with speculative_config"):
        LLM("nothing", speculative_config=SPECULATIVE, pipeline_depth=2)
