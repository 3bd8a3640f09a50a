"""A16: prompts that are cached whole, and end where a block ends: something is always computed, and all is the same."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [2000 + (31 * i + 977 * seed) % 9000 for i in range(length)]


def run(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    llm._live_engine().check_invariants()
    return output


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_sent_three_times_then_one_token_longer(llm: LLM, num_blocks: int) -> None:
    prompt = prompt_of(num_blocks * BLOCK, seed=num_blocks)
    outputs = [run(llm, prompt) for _ in range(3)]
    # the answer's first block was filled too, but the last token of the prompt must be computed for its logits
    assert [output.num_cached_tokens for output in outputs] == [0, *[(num_blocks - 1) * BLOCK] * 2]
    assert all(output.outputs == outputs[0].outputs for output in outputs)
    longer = run(llm, [*prompt, 2001])
    assert longer.num_cached_tokens == num_blocks * BLOCK
    fresh = run(llm, [*prompt, 2001], GREEDY.replace(skip_reading_prefix_cache=True))
    assert fresh.num_cached_tokens == 0
    assert fresh.outputs == longer.outputs


def test_where_single_tokens_are_found_all_but_the_last_are(smollm2_path: str) -> None:
    prompt = prompt_of(2 * BLOCK)
    with LLM(smollm2_path, max_model_len=256, prefix_index="radix") as radix:
        outputs = [run(radix, prompt) for _ in range(3)]
        assert [output.num_cached_tokens for output in outputs] == [0, 31, 31]
        assert all(output.outputs == outputs[0].outputs for output in outputs)
        assert run(radix, [*prompt, 2001]).num_cached_tokens == 32


def test_the_answer_is_a_prefix_too(llm: LLM) -> None:
    prompt = prompt_of(BLOCK, seed=20)
    first = run(llm, prompt)
    conversation = [*prompt, *first.outputs[0].token_ids]
    assert len(conversation) == 36
    assert run(llm, conversation).num_cached_tokens == 2 * BLOCK


def test_after_eviction_it_is_computed_again(llm: LLM) -> None:
    """A pool of about 180 blocks is flooded, so that none of the old names may lead anywhere."""
    prompt = prompt_of(4 * BLOCK, seed=40)
    first = run(llm, prompt)
    assert run(llm, prompt).num_cached_tokens == 3 * BLOCK
    flood = [prompt_of(980, seed=100 + i) for i in range(3)]
    llm.generate(flood, GREEDY.replace(max_tokens=1), use_tqdm=False)
    evicted = run(llm, prompt)
    assert evicted.num_cached_tokens == 0
    assert evicted.outputs == first.outputs
    assert run(llm, prompt).num_cached_tokens == 3 * BLOCK


def test_many_at_once(llm: LLM) -> None:
    prompts = [prompt_of(length, seed=60) for length in (32, 33, 48, 15)]
    alone = [run(llm, prompt, GREEDY.replace(skip_reading_prefix_cache=True)).outputs for prompt in prompts]
    outputs = llm.generate(prompts * 3, GREEDY, use_tqdm=False)
    for prompt, output, expected in zip(prompts * 3, outputs, alone * 3, strict=True):
        assert output.num_cached_tokens <= len(prompt) - 1
        assert output.num_cached_tokens % BLOCK == 0
        assert output.outputs == expected
