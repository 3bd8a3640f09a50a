"""Speculation in the real engine: whatever is guessed, the same tokens, logprobs and ends; and the counts add up.

The guesses come from one who knows the answers, so that many are right whatever the sampling, and is often wrong on
purpose. What n-grams guess on a real model is the matter of ``tests/cases/test_a14_speculation.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import pytest

from octavo.config import SpeculativeConfig
from octavo.config.choices import DRAFTERS
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.messages import BeamSearch, RequestOutputKind, SchedulerStats, StructuredOutputsParams
from octavo.worker.request_states import RequestStates

from .test_async_llm import metric, read
from .test_sampling import FEATURES, finals, params
from .tiny_llama import VOCAB, make_config

SPECULATIVE = SpeculativeConfig(
    method="ngram",
    num_speculative_tokens=4,
    prompt_lookup_min=1,
    prompt_lookup_max=3,
    disable_by_batch_size=16,
)
MORE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop strings": {"stop": ["the", "e ", "q", "\\n"], "max_tokens": 60},
    "stop strings of samples": {"stop": ["o", "a"], "n": 3, "temperature": 1.0, "seed": 9, "logprobs": 1},
    "unseeded": {"temperature": 1.0},
    "beams": {"beam_search": BeamSearch(beam_width=3), "n": 2},
    "json": {
        "structured_outputs": StructuredOutputsParams(json_object=True),
        "temperature": 1.0,
        "seed": 8,
        "ignore_eos": False,
    },
    "regex": {"structured_outputs": StructuredOutputsParams(regex="(ab|c){3,40}"), "ignore_eos": False},
}
ASKED = {
    name: params(**{"max_tokens": 40, "output_kind": RequestOutputKind.FINAL_ONLY} | fields)
    for name, fields in (FEATURES | MORE).items()
}
PROMPTS = [[(5 * i + 3 * at) % 300 + 2 for i in range(28 + at)] for at in range(len(ASKED))]


class Prophet:
    """Guesses what comes next in one of ``texts``; every fifth token and every third draft as a whole is wrong."""

    texts: ClassVar[list[list[int]]] = []

    def __init__(self, config: SpeculativeConfig) -> None:
        self._num_tokens = config.num_speculative_tokens

    def propose(self, states: RequestStates, request_ids: Collection[str]) -> dict[str, list[int]]:
        drafts = {}
        for request_id in request_ids:
            if (row := states.row_of.get(request_id)) is None:
                continue
            tokens = states.tokens(row).tolist()
            count = len(tokens)
            draft = next((t[count : count + self._num_tokens] for t in self.texts if t[:count] == tokens), [])
            wrong = [(count % 3 == 0 and i == 0) or (count + i) % 5 == 0 for i in range(len(draft))]
            if draft:
                drafts[request_id] = [(t + 1) % VOCAB if bad else t for t, bad in zip(draft, wrong, strict=True)]
        return drafts


def make_engine(model: str, **changes: Any) -> LLMEngine:
    return LLMEngine(make_config(model, **{"backend": "cpu", "threads": 1, "weights_cache": False} | changes))


@pytest.fixture(scope="module")
def alone(tiny_model: str) -> list[RequestOutput]:
    """Every request by itself, without speculation."""
    engine = make_engine(tiny_model)
    found = [finals(engine, [prompt], [one])[0] for prompt, one in zip(PROMPTS, ASKED.values(), strict=True)]
    engine.shutdown()
    return found


@pytest.fixture
def prophet(alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[*prompt, *sample.token_ids] for prompt, one in zip(PROMPTS, alone, strict=True) for sample in one.outputs]
    # A stop string hides what would follow; guess on, for it must not be counted.
    monkeypatch.setattr(Prophet, "texts", [[*text, *range(30, 40)] for text in texts])
    monkeypatch.setitem(DRAFTERS, "ngram", f"{__name__}:Prophet")


class Counts:
    """What the scheduler's reports add up to."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts = self.tried = self.steps = 0
        self.right: list[int] = []
        step = engine._client.step

        def counted() -> Any:
            outputs = step()
            self.steps += 1
            assert outputs.stats is not None
            self._add(outputs.stats)
            return outputs

        monkeypatch.setattr(engine._client, "step", counted)

    def _add(self, stats: SchedulerStats) -> None:
        self.drafts += stats.num_drafts_delta
        self.tried += stats.num_draft_tokens_delta
        self.right += [0] * (len(stats.accepted_per_position_delta) - len(self.right))
        for position, count in enumerate(stats.accepted_per_position_delta):
            self.right[position] += count


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backend": "reference"},
        {"kv_tokens": 192},
        {"kv_tokens": 192, "swap_space": 0.01, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"kv_cache_dtype": "int8", "threads": 2},
    ],
    ids=["roomy", "reference", "preempted", "swapped", "chunked", "tiny chunks uncached", "int8"],
)
@pytest.mark.usefixtures("prophet")
def test_no_request_can_tell(
    tiny_model: str, alone: list[RequestOutput], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if changes.keys() & {"kv_cache_dtype", "backend"}:  # other numbers, so other answers
        plain = make_engine(tiny_model, **changes)
        alone = [finals(plain, [prompt], [one])[0] for prompt, one in zip(PROMPTS, ASKED.values(), strict=True)]
        plain.shutdown()
    engine = make_engine(tiny_model, speculative_config=SPECULATIVE, **changes)
    counts = Counts(engine, monkeypatch)
    try:
        for again in (False, True):  # the second time behind what the first one left in the cache
            for name, expected, got in zip(ASKED, alone, finals(engine, PROMPTS, list(ASKED.values())), strict=True):
                if again and name == "unseeded":
                    continue  # which gets another seed each time
                assert got.outputs == expected.outputs, name
                assert got.prompt_logprobs == expected.prompt_logprobs, name
    finally:
        engine.shutdown()
    assert counts.drafts > 30
    assert counts.drafts <= counts.tried <= 4 * counts.drafts
    assert counts.right == sorted(counts.right, reverse=True)
    assert 10 < sum(counts.right) < counts.tried
    assert 1 < len(counts.right) <= 4


@pytest.mark.usefixtures("prophet")
def test_right_guesses_save_steps(tiny_model: str, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step gives one token, and those that were right."""
    index = list(ASKED).index("greedy")
    engine = make_engine(tiny_model, speculative_config=SPECULATIVE)
    counts = Counts(engine, monkeypatch)
    (got,) = finals(engine, [PROMPTS[index]], [ASKED["greedy"]])
    assert got.outputs == alone[index].outputs
    assert counts.steps == 40 - sum(counts.right) + 1  # and one in which it is forgotten
    engine.shutdown()


@pytest.mark.usefixtures("prophet")
def test_a_request_whose_guesses_are_never_right_stops_guessing(
    tiny_model: str, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = list(ASKED).index("greedy")
    monkeypatch.setattr(
        Prophet, "propose", lambda self, states, ids: {name: [0, 0] for name in ids if name in states.row_of}
    )
    engine = make_engine(tiny_model, speculative_config=SPECULATIVE)
    counts = Counts(engine, monkeypatch)
    (got,) = finals(engine, [PROMPTS[index]], [ASKED["greedy"]])
    engine.shutdown()
    assert got.outputs == alone[index].outputs
    assert 0 not in got.outputs[0].token_ids
    assert (counts.drafts, counts.tried, counts.right) == (5, 6, [])  # behind tokens 1, 3, 7, 15 and 31 of 40


async def test_the_metrics_are_vllms(tiny_model: str) -> None:
    engine = await AsyncLLM.create(make_config(tiny_model, speculative_config=SPECULATIVE))
    try:
        prompt = [30, 31, 30, 31]
        sampling = params(max_tokens=30, allowed_token_ids=[30], output_kind=RequestOutputKind.DELTA)
        assert await read(engine, prompt, sampling, request_id="r") == [30] * 30
        labels = 'engine="0",model_name="tiny"'
        drafts, tried, right = (
            metric(engine, rf"spec_decode_num_{name}_total\{{{labels}\}}")
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        by_position = [
            metric(engine, rf'spec_decode_num_accepted_tokens_per_pos_total\{{{labels},position="{i}"\}}')
            for i in range(4)
        ]
    finally:
        await engine.shutdown()
    assert 0 < drafts <= tried <= 4 * drafts
    assert right == sum(by_position) > 15
    assert by_position == sorted(by_position, reverse=True)
