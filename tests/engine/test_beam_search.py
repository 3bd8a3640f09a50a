"""Beam search through the real engine: transformers' sequences and scores, in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.exceptions import ValidationError
from octavo.messages import BeamSearch, BeamSearchParams, RequestOutputKind, SamplingParams
from tests.models.tiny import save

from .tiny_llama import VOCAB, make_config, write_tokenizer

PROMPTS = [[7 * i % 300 + 5 for i in range(37)], [11, 12], [9 * i % 300 + 3 for i in range(16)]]


@pytest.fixture(scope="module")
def transformers_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A random Llama in float32, there and here."""
    folder: Path = tmp_path_factory.mktemp("beams")
    # small weights: the best continuations are close to each other, so that beams cross
    model = save(folder, vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.2)
    write_tokenizer(folder)
    return model, str(folder)


@pytest.fixture(scope="module")
def engine(transformers_model: tuple[Any, str]) -> Iterator[LLMEngine]:
    made = LLMEngine(make_config(transformers_model[1]))
    yield made
    made.shutdown()


def run(engine: LLMEngine, *requests: tuple[list[int], SamplingParams]) -> list[RequestOutput]:
    """The last output of each request, all in one batch."""
    parents = [
        engine.add_request(prompt, params.replace(output_kind=RequestOutputKind.FINAL_ONLY))
        for prompt, params in requests
    ]
    found = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    engine.drain()
    engine.check_invariants()
    return [found[parent.request_id] for parent in parents]


def beams_of(engine: LLMEngine, prompt: list[int], params: BeamSearchParams) -> list[CompletionOutput]:
    return run(engine, (prompt, params.sampling_params()))[0].outputs


def of_transformers(model: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """(output, score) of its beams."""
    with torch.no_grad():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width if params.n is None else params.n,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            eos_token_id=params.stop_token_ids or None,
            pad_token_id=VOCAB - 1,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for sequence, score in zip(result.sequences[:, len(prompt) :].tolist(), result.sequences_scores.tolist()):
        ends = [i for i, token in enumerate(sequence) if token in params.stop_token_ids]
        found.append((sequence[: ends[0] + 1] if ends else sequence, score))
    return found


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize(
    ("width", "stops"), [(1, []), (2, []), (4, []), (4, range(0, 300, 7)), (5, range(0, 300, 3)), (8, [20, 30, 40])]
)
def test_equal_to_transformers(
    transformers_model: tuple[Any, str],
    engine: LLMEngine,
    width: int,
    stops: list[int],
    length_penalty: float,
    early_stopping: Any,
) -> None:
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=14,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=[*stops][: VOCAB // width - 1],
        ignore_eos=True,
    )
    for prompt in PROMPTS:
        found = beams_of(engine, prompt, params)
        if width == 1:
            (plain,) = run(engine, (prompt, SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)))
            assert found[0].token_ids == plain.outputs[0].token_ids
            continue
        expected = of_transformers(transformers_model[0], prompt, params)
        assert [one.token_ids for one in found] == [tokens for tokens, _ in expected]
        for one, (tokens, score) in zip(found, expected, strict=True):
            assert one.cumulative_logprob is not None
            assert one.cumulative_logprob / len(tokens) ** length_penalty == pytest.approx(score, abs=2e-4)


def test_outputs_are_whole_and_best_first(engine: LLMEngine) -> None:
    params = BeamSearchParams(beam_width=4, n=3, max_tokens=10, logprobs=2, length_penalty=0.0, ignore_eos=True)
    outputs = beams_of(engine, PROMPTS[0], params)
    assert [one.index for one in outputs] == [0, 1, 2]
    totals = [one.cumulative_logprob or 0.0 for one in outputs]
    assert totals == sorted(totals, reverse=True)
    for one in outputs:
        assert len(one.token_ids) == 10
        assert one.finish_reason == "length"
        assert one.text == engine.tokenizer.decode(one.token_ids)
        assert one.logprobs is not None
        assert sum(entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids)) == one.cumulative_logprob
        for entry, token in zip(one.logprobs, one.token_ids):
            assert next(iter(entry)) == token
            assert len(entry) == 2 + (entry[token].rank > 2)
            assert sorted(logprob.rank for logprob in entry.values())[:2] == [1, 2]


def test_eos_ends_a_beam_and_is_no_text(engine: LLMEngine) -> None:
    outputs = beams_of(engine, [50], BeamSearchParams(beam_width=8, max_tokens=8, length_penalty=0.0))
    ended = [one for one in outputs if one.finish_reason == "stop"]
    assert ended, "no beam met EOS"
    for one in ended:
        assert one.token_ids[-1] in engine.tokenizer.eos_token_ids
        assert one.stop_reason is None
        assert one.text == engine.tokenizer.decode(one.token_ids[:-1])


@pytest.mark.parametrize(
    "change",
    [
        {"enable_prefix_caching": False},
        {"pipeline_depth": 2},
        {"max_num_seqs": 3},
        {"kv_tokens": 144, "max_model_len": 100},
        {"kv_tokens": 128, "max_model_len": 100, "enable_prefix_caching": False, "max_num_seqs": 2},
    ],
    ids=["no caching", "two in flight", "waves", "tight", "tight waves"],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_same_in_any_company(transformers_model: tuple[Any, str], backend: str, change: dict[str, Any]) -> None:
    beams = [
        (PROMPTS[0], BeamSearchParams(beam_width=5, n=2, max_tokens=30, early_stopping="never").sampling_params()),
        (PROMPTS[2], BeamSearchParams(beam_width=3, max_tokens=20).sampling_params()),
    ]
    crowd = [(PROMPTS[i % 3], SamplingParams(n=2, seed=i, max_tokens=25, ignore_eos=True)) for i in range(4)]
    answers = []
    for changes in ({}, change):
        engine = LLMEngine(make_config(transformers_model[1], backend=backend, weights_cache=False, **changes))
        try:
            if not changes:
                answers.append([run(engine, one)[0].outputs for one in [*beams, *crowd]])  # each alone
            else:
                answers.append([output.outputs for output in run(engine, *beams, *crowd)])
                answers.append([output.outputs for output in run(engine, *beams, *crowd)])  # warm
        finally:
            engine.shutdown()
    assert answers[0] == answers[1] == answers[2]


def test_what_does_not_go_together_is_refused(engine: LLMEngine) -> None:
    beams = BeamSearch(beam_width=3)
    for name, value in {
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "stop": ["x"],
        "logit_bias": {3: 1.0},
        "allowed_token_ids": [3],
        "prompt_logprobs": 1,
        "n": 4,
    }.items():
        with pytest.raises(ValidationError, match=name) as caught:
            SamplingParams(beam_search=beams, **{name: value})
        assert caught.value.parameter == name
    for name, wrong in [("beam_width", 0), ("beam_width", 1.5), ("length_penalty", float("nan"))]:
        with pytest.raises(ValidationError, match=name):
            BeamSearch(**{"beam_width": 2} | {name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="early_stopping"):
        BeamSearch(beam_width=2, early_stopping="always")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"beam_width.*at most 128"):
        engine.add_request([3], SamplingParams(beam_search=BeamSearch(beam_width=129)))
    stops = list(range(100))
    with pytest.raises(ValidationError, match=rf"beam_width must be at most {VOCAB // 102}.*got 9"):
        engine.add_request([3], SamplingParams(beam_search=BeamSearch(beam_width=9), stop_token_ids=stops))
    assert not engine.has_unfinished()


def test_offline(transformers_model: tuple[Any, str], engine: LLMEngine) -> None:
    params = [BeamSearchParams(beam_width=3, max_tokens=9), BeamSearchParams(beam_width=2, n=1, max_tokens=5)]
    with LLM(transformers_model[1], backend="reference", kv_cache_memory="1MiB") as llm:
        found = llm.beam_search(PROMPTS[:2], params, use_tqdm=False)
        assert [output.outputs for output in found] == [beams_of(engine, *one) for one in zip(PROMPTS, params)]
        same = llm.beam_search(PROMPTS, params[0], use_tqdm=False)
        assert same[0].outputs == found[0].outputs
        assert [len(output.outputs) for output in same] == [3, 3, 3]
        for wrong in ("beam_width=3", {"beam_width": 3}, [SamplingParams()], params):
            with pytest.raises(ValidationError):
                llm.beam_search(PROMPTS, wrong)  # type: ignore[arg-type]
