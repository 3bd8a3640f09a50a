"""A05: presence and frequency count the output only, repetition prompt and output; also after recomputation.

The logits that the draw sees are read through ``logprobs_mode="processed_logits"`` and compared with a float64 oracle
over the raw ones, at every step, with cached prefixes and with requests that were preempted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from octavo import RequestOutput, SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.messages import RequestOutputKind
from tests.engine.tiny_llama import VOCAB, make_config, write_model, write_tokenizer

KINDS = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.9},
    "repetition": {"repetition_penalty": 1.5},
    "all": {"presence_penalty": -1.0, "frequency_penalty": 0.4, "repetition_penalty": 0.8},
}


def oracle(raw: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """The definition, in float64."""
    row = raw.astype(np.float64)
    for token in {*prompt, *output}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row


def rows(output: RequestOutput) -> list[np.ndarray]:
    """Per output token, the numbers of the whole vocabulary."""
    found = []
    for entry in output.outputs[0].logprobs or []:
        row = np.empty(VOCAB)
        for token_id, number in entry.items():
            row[token_id] = number.logprob
        found.append(row)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("penalised")
    write_tokenizer(folder)
    write_model(folder)
    return str(folder)


def run(
    model: str, mode: str, kv_tokens: int, prompts: list[list[int]], asked: list[SamplingParams]
) -> list[RequestOutput]:
    engine = LLMEngine(make_config(model, kv_tokens=kv_tokens, max_logprobs=-1, logprobs_mode=mode))
    try:
        done: dict[str, RequestOutput] = {}
        for prompt, params in zip(prompts, asked, strict=True):
            engine.add_request(prompt, params)
        while engine.has_unfinished():
            done |= {output.request_id: output for output in engine.step()}
        engine.drain()
        engine.check_invariants()
    finally:
        engine.shutdown()
    return [done[str(at)] for at in range(len(prompts))]


def test_every_step_against_the_oracle(model: str) -> None:
    shared = [40, 41, 42, 42, 42] * 8  # repeats tokens, and is longer than two blocks: later requests find it cached
    prompts = [[*shared, 60 + at] for at in range(len(KINDS))]
    asked = [
        SamplingParams(
            **kind,
            temperature=0,
            ignore_eos=True,
            max_tokens=45,
            logprobs=-1,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for kind in KINDS.values()
    ]
    raw = run(model, "raw_logits", 4096, prompts, asked)
    seen = run(model, "processed_logits", 4096, prompts, asked)
    tight = run(model, "processed_logits", 160, prompts, asked)
    assert any(output.num_cached_tokens for output in seen)
    assert sum(output.metrics.num_preemptions for output in tight if output.metrics) > 0
    for prompt, params, before, after, again in zip(prompts, asked, raw, seen, tight, strict=True):
        ids = before.outputs[0].token_ids
        assert ids == after.outputs[0].token_ids == again.outputs[0].token_ids
        assert len(set(ids)) < len(ids)  # some token came twice, so counting matters
        for step, row in enumerate(rows(before)):
            expected = oracle(row, prompt, ids[:step], params)
            np.testing.assert_allclose(rows(after)[step], expected, atol=2e-4)
            assert int(expected.argmax()) == ids[step]
        assert after.outputs[0].logprobs == again.outputs[0].logprobs
