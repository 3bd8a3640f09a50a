"""The default model on the CPU backend, through both engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.messages import RequestOutputKind

pytest.importorskip("octavo.backends.cpu._kernels", reason="the CPU kernels are not built")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LIMITS = {"max_model_len": 512, "kv_cache_memory": "64MiB", "max_num_seqs": 16}


@pytest.fixture(scope="module")
def llm(smollm2_path: str) -> Iterator[LLM]:
    with LLM(smollm2_path, **LIMITS) as one:
        yield one


def test_capital_of_france(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, GREEDY)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"  # EOS ended it,
    assert "<|im_end|>" not in output.outputs[0].text  # and is not shown


def test_streamed_text_equals_the_whole(llm: LLM, smollm2_path: str) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time, 東京 🙂")
    (whole,) = llm.generate([ids], GREEDY)

    async def stream() -> str:
        config = resolve_engine_config(engine_config_from_kwargs(model=smollm2_path, **LIMITS))
        engine = await AsyncLLM.create(config)
        deltas = GREEDY.replace(output_kind=RequestOutputKind.DELTA)
        text = "".join([output.outputs[0].text async for output in engine.generate(ids, deltas)])
        await engine.shutdown()
        return text

    assert asyncio.run(stream()) == whole.outputs[0].text


def test_sixteen_prompts_are_each_what_they_are_alone(llm: LLM) -> None:
    prompts = [f"{i} things to know about the number {i}: " * (1 + i % 3) for i in range(16)]
    together = llm.generate(prompts, GREEDY)
    for index in (0, 5, 11):
        (alone,) = llm.generate([prompts[index]], GREEDY)
        assert alone.outputs[0].token_ids == together[index].outputs[0].token_ids
