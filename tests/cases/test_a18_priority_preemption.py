"""A18: a request that was planned in this very step gives way: it leaves the plan, and all that it held comes back."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.config import SchedulerConfig
from octavo.messages import SchedulingOptions
from tests.core.checking_worker import Loop, cache_config, make_request
from tests.core.policies import ByPriority


@pytest.mark.parametrize("depth", [1, 2])
def test_the_victim_leaves_the_plan_and_its_budget_comes_back(depth: int) -> None:
    """Served in order of admission: A has its token when B, which is more urgent, finds no block."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=6)
    loop = Loop(config, cache_config(4), num_blocks=5, depth=depth, policy=ByPriority())  # four usable
    loop.add(make_request("A", [1] * 4, priority=1, max_tokens=12))
    loop.step()
    loop.add(make_request("B", [2] * 7, priority=0, max_tokens=10))
    plans = []
    while "B" not in loop.received or loop.received["B"].finish_reason is None:
        if (plan := loop.step()) is not None:
            plans.append(plan)
    preempting = [plan for plan in plans if "A" in plan.finished_request_ids]
    assert preempting
    for plan in preempting:
        assert list(plan.num_scheduled_tokens) == ["B"]  # A's token was planned before, and is gone
    loop.run()
    loop.check_results()
    assert loop.received["A"].facts.num_preemptions == len(preempting)


def test_a_newcomer_leaves_the_blocks_that_a_more_urgent_one_needs_next() -> None:
    """M could start in the place of Y, but then X would find no block for the token that it has just sampled."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, scheduling_policy="priority")
    loop = Loop(config, cache_config(4), num_blocks=7)  # six usable
    loop.add(make_request("X", [1] * 8, priority=0, max_tokens=4))
    loop.add(make_request("Y", [2] * 2, priority=2, max_tokens=4))
    loop.step()
    loop.add(make_request("M", [3] * 16, priority=1, max_tokens=4))
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"X": 1, "Y": 1}
    loop.run()
    loop.check_results()
    assert sum(received.facts.num_preemptions for received in loop.received.values()) == 0


def test_outputs_on_a_real_model_are_those_of_uncontended_runs(smollm2_path: str) -> None:
    """A pool for about two of six requests, two seats, and priorities against the order of arrival."""
    prompts = [f"Here is list number {i} of things to do on a rainy day:\n1." for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    options = {"max_model_len": 256, "scheduling_policy": "priority", "max_num_batched_tokens": 16, "max_num_seqs": 3}
    with LLM(smollm2_path, kv_cache_memory="32MiB", **options) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    with LLM(smollm2_path, kv_cache_memory="4MiB", **options) as llm:  # eleven blocks
        engine = llm._live_engine()
        for number, prompt in enumerate(prompts):
            scheduling = SchedulingOptions(priority=5 - number)
            engine.add_request(prompt, params, request_id=str(number), scheduling=scheduling)
            for _ in range(8):
                engine.step()
        ended = {}
        while engine.has_unfinished():
            ended |= {output.request_id: output for output in engine.step() if output.finished}
        preempted = sum(output.metrics.num_preemptions for output in ended.values())
    assert preempted >= 2
    for number, expected in enumerate(alone):
        assert ended[str(number)].outputs[0].token_ids == expected.outputs[0].token_ids
