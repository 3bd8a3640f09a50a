"""The scheduler's rules one by one; that they hold together is in tests/property."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.core.factory import make_scheduler
from octavo.core.kv_cache.manager import Room
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepBuilder
from octavo.exceptions import ConfigError, InvariantError, ValidationError
from octavo.messages import (
    FinishReason,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
    max_tokens_that_fit,
)
from tests.core.checking_worker import EOS, Loop, cache_config, make_request
from tests.core.policies import ByPriority, SortedByPriority


def small(*, num_blocks: int = 100, max_model_len: int = 1000, block_size: int = 4, **options: int | bool) -> Scheduler:
    return make_scheduler(SchedulerConfig(**options), cache_config(block_size), num_blocks, max_model_len)


def answer(plan: SchedulerOutput, token_id: int = 9, *request_ids: str) -> ModelRunnerOutput:
    ids = request_ids or tuple(plan.num_scheduled_tokens)
    return ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids={i: [token_id] for i in ids})


def test_a_step_mixes_decoding_and_a_chunk_of_a_prompt() -> None:
    scheduler = small(max_num_batched_tokens=10, max_num_seqs=4)
    scheduler.add_request(make_request("a", [1] * 4))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 4}
    scheduler.update(plan, answer(plan))
    scheduler.add_request(make_request("b", [2] * 15))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 9}
    assert [r.request_id for r in plan.cached_requests] == ["a"]
    assert [(r.request_id, r.num_computed_tokens, len(r.block_ids)) for r in plan.new_requests] == [("b", 0, 3)]
    outputs = scheduler.update(plan, answer(plan, 9, "a")).outputs
    assert [o.request_id for o in outputs] == ["a"]
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 6}
    assert {r.request_id: r.num_computed_tokens for r in plan.cached_requests} == {"a": 5, "b": 9}


def test_long_prefill_threshold() -> None:
    scheduler = small(max_num_batched_tokens=8, max_num_seqs=4, long_prefill_token_threshold=3)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, list(range(20))))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3, "b": 3, "c": 2}


def test_one_token_is_kept_for_each_request_behind() -> None:
    loop = Loop(
        SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4),
        cache_config(4),
        num_blocks=100,
        policy=SortedByPriority(),
    )
    loop.add(make_request("low", [1] * 7, priority=1))
    loop.step()
    loop.add(make_request("high", [2] * 20, priority=0))
    plans = [loop.step(), loop.step(), loop.step()]
    assert [plan and plan.num_scheduled_tokens for plan in plans] == [
        {"low": 1, "high": 7},
        {"high": 7, "low": 1},
        {"high": 6, "low": 1},
    ]


def test_nobody_starts_in_a_step_that_preempted() -> None:
    loop = Loop(SchedulerConfig(max_num_seqs=4), cache_config(4), num_blocks=5, policy=ByPriority())
    loop.add(make_request("first", [1] * 8, priority=0, max_tokens=3))
    loop.add(make_request("last", [2] * 7, priority=2, max_tokens=3))
    loop.step()
    loop.add(make_request("small", [3], priority=1))
    plan = loop.step()  # "first" needs a third block, and there are four
    assert plan is not None
    assert plan.finished_request_ids == ["last"]
    assert plan.num_scheduled_tokens == {"first": 1}
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"first": 1, "small": 1}
    loop.run()
    loop.check_results()


def test_without_chunking_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = small(max_num_batched_tokens=10, max_num_seqs=4, enable_chunked_prefill=False)
    scheduler.add_request(make_request("a", [1] * 6))
    scheduler.add_request(make_request("b", [2] * 6))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 6}
    scheduler.update(plan, answer(plan))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1, "b": 6}
    with pytest.raises(ValidationError, match=r"11 tokens.*at most 10") as caught:
        scheduler.add_request(make_request("c", [1] * 11))
    assert caught.value.parameter == "prompt"


def test_max_num_seqs() -> None:
    scheduler = small(max_num_seqs=2)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, [1]))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_prompt_that_can_never_fit_is_refused_naming_both_numbers() -> None:
    scheduler = small(num_blocks=16, block_size=16, max_model_len=4096)
    assert max_tokens_that_fit(16, 16) == 240
    with pytest.raises(ValidationError, match=r"300 tokens.*KV cache.*240") as caught:
        scheduler.add_request(make_request("a", [1] * 300))
    assert caught.value.parameter == "prompt"
    assert not scheduler.has_requests()
    with pytest.raises(ValidationError, match=r"64 tokens.*context of 64.*63"):
        small(max_model_len=64).add_request(make_request("a", [1] * 64))
    with pytest.raises(ValidationError, match="no tokens"):
        scheduler.add_request(make_request("a", []))
    with pytest.raises(ConfigError, match="num_blocks = 1"):
        small(num_blocks=1)


def test_request_that_outgrows_the_pool_alone_ends_with_length_and_the_next_one_completes() -> None:
    loop = Loop(SchedulerConfig(), cache_config(16), num_blocks=16, max_model_len=4096)
    loop.add(make_request("big", [1] * 200, max_tokens=200))
    loop.add(make_request("small", [2] * 5))
    loop.run()
    loop.check_results()
    assert loop.received["big"].finish_reason is FinishReason.LENGTH
    assert len(loop.received["big"].tokens) == 41  # 240 tokens of KV, and one that needs none
    assert len(loop.received["small"].tokens) == 8


def test_shortage_preempts_the_last_and_it_comes_back_first_with_its_tokens() -> None:
    scheduler = small(num_blocks=5, max_num_seqs=4)
    scheduler.add_request(make_request("a", [1] * 8))
    scheduler.add_request(make_request("b", [2] * 7))
    plan = scheduler.schedule()
    outputs = scheduler.update(plan, answer(plan)).outputs
    told = [output.facts for output in outputs]
    assert [facts.num_cached_tokens for facts in told if facts] == [0, 0]
    scheduler.add_request(make_request("c", [3]))
    plan = scheduler.schedule()  # "a" needs a third block, and there are four
    assert plan.num_scheduled_tokens == {"a": 1}  # nobody is admitted in a step that preempted
    assert plan.finished_request_ids == ["b"]
    scheduler.check_invariants()
    scheduler.update(plan, answer(plan))
    assert [o.finish_reason for o in scheduler.abort(["a"])] == [FinishReason.ABORT]
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["b", "c"]
    assert plan.finished_request_ids == ["a"]
    back = plan.new_requests[0]
    assert (back.token_ids, back.num_prompt_tokens, back.num_computed_tokens) == ([2] * 7 + [9], 7, 4)
    output = scheduler.update(plan, answer(plan)).outputs[0]
    assert told[1] is not None
    assert output.request_id == "b"
    assert output.facts == msgspec.structs.replace(told[1], num_preemptions=1), "all of it, with what is new"
    plan = scheduler.schedule()
    assert [output.facts for output in scheduler.update(plan, answer(plan)).outputs] == [None, None], "nothing new"


def test_victim_already_in_the_plan_is_taken_out_of_it() -> None:
    """A18: "low" is planned first, then "high" needs its blocks."""
    config = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, long_prefill_token_threshold=8)
    loop = Loop(config, cache_config(4), num_blocks=9, policy=ByPriority())
    text = [*range(20), 1, 1, 1, 1]
    loop.add(make_request("low", text, priority=2))
    loop.step()
    loop.add(make_request("high", [5] * 8, priority=0, max_tokens=2))
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"low": 8, "high": 8}
    plan = loop.step()  # "low" takes the last two of eight blocks, then "high" needs its third
    assert plan is not None
    assert (plan.num_scheduled_tokens, plan.finished_request_ids) == ({"high": 1}, ["low"])
    assert not plan.cached_requests[1:]
    loop.add(make_request("twin", [*text[:20], 2], priority=1))
    plan = loop.step()  # shares the 16 tokens that were computed, not the 4 that were planned and undone
    assert plan is not None
    assert plan.new_requests[0].request_id == "twin"
    assert plan.new_requests[0].num_computed_tokens == 16
    loop.run()
    loop.check_results()
    assert loop.received["low"].facts.num_preemptions >= 1


def test_prompts_that_are_under_way_keep_room_for_their_rest() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, long_prefill_token_threshold=4)
    loop = Loop(config, cache_config(4), num_blocks=11)  # ten blocks
    loop.add(make_request("a", list(range(24)), max_tokens=1))  # six
    loop.add(make_request("b", [5] * 20, max_tokens=1))  # five: though nine are free, "a" is going to take five of them
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"a": 4}
    loop.run()
    loop.check_results()
    assert sum(received.facts.num_preemptions for received in loop.received.values()) == 0


def test_undo_gives_the_budget_back() -> None:
    step = StepBuilder(3, 10)
    requests = [Request(make_request(i, [1] * 8), SOLO, limit=20, queued_time=0.0) for i in "ab"]
    for request, count in zip(requests, (4, 5), strict=True):
        step.add(request, count, Room([1, 2]), is_new=True)
    assert step.tokens_left == 1
    step.undo(requests[0])
    assert (step.tokens_left, step.num_preempted) == (5, 1)
    plan = step.build(["a"])
    assert (plan.step_id, plan.num_scheduled_tokens, plan.finished_request_ids) == (3, {"b": 5}, ["a"])
    assert [request.request_id for request in plan.new_requests] == ["b"]


def test_two_steps_in_flight_and_the_token_after_the_end_is_dropped() -> None:
    scheduler = small()
    scheduler.add_request(make_request("a", [1] * 4, eos=True))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 4}, {"a": 1})
    assert second.cached_requests[0].num_computed_tokens == 4
    output = scheduler.update(first, answer(first, EOS)).outputs[0]
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([EOS], FinishReason.STOP, None)
    third = scheduler.schedule()
    assert third.finished_request_ids == ["a"]
    assert not third.is_empty
    assert scheduler.update(second, answer(second)).outputs == []
    assert not scheduler.has_requests()
    assert scheduler.schedule().is_empty


def test_no_step_is_planned_beyond_the_last_token() -> None:
    scheduler = small()
    scheduler.add_request(make_request("a", [1] * 4, max_tokens=2))
    plans = [scheduler.schedule() for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 4}, {"a": 1}, {}]
    assert plans[2].is_empty
    assert scheduler.update(plans[0], answer(plans[0])).outputs[0].finish_reason is None
    assert scheduler.update(plans[1], answer(plans[1])).outputs[0].finish_reason is FinishReason.LENGTH


def outcome(token_ids: list[int], **options: object) -> tuple[int, FinishReason | None, int | str | None]:
    scheduler = small(max_model_len=12)
    scheduler.add_request(make_request("a", [1] * 4, **options))
    for count, token_id in enumerate(token_ids, start=1):
        plan = scheduler.schedule()
        output = scheduler.update(plan, answer(plan, token_id)).outputs[0]
        if output.finish_reason is not None:
            return count, output.finish_reason, output.stop_reason
    return len(token_ids), None, None


def test_reasons_to_stop() -> None:
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert outcome([5, EOS], eos=True) == (2, stop, None)
    assert outcome([5, EOS, 5], eos=False) == (3, None, None)
    assert outcome([5, 7], stop_token_ids=[7]) == (2, stop, 7)
    assert outcome([EOS], eos=False, stop_token_ids=[EOS]) == (1, stop, EOS)
    assert outcome([EOS], eos=True, stop_token_ids=[EOS]) == (1, stop, None)
    assert outcome([EOS, 7, 5, EOS], eos=True, stop_token_ids=[7], min_tokens=3) == (4, stop, None)
    assert outcome([EOS, 7, EOS], eos=True, stop_token_ids=[7], min_tokens=3) == (3, stop, None)
    assert outcome([5] * 9, max_tokens=3) == (3, length, None)
    assert outcome([5] * 9, max_tokens=None) == (8, length, None)  # max_model_len 12
    assert outcome([5] * 9, max_tokens=8) == (8, length, None)
    assert outcome([7], max_tokens=1, stop_token_ids=[7]) == (1, stop, 7)


def test_errors_end_one_request_alone() -> None:
    scheduler = small()
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, [1, 2]))
    plan = scheduler.schedule()
    result = ModelRunnerOutput(
        step_id=plan.step_id, sampled_token_ids={"b": [3]}, errors={"a": RequestFault("NaN in its logits")}
    )
    outputs = {o.request_id: o for o in scheduler.update(plan, result).outputs}
    assert (outputs["a"].finish_reason, outputs["a"].error) == (FinishReason.ERROR, RequestFault("NaN in its logits"))
    assert outputs["c"].finish_reason == FinishReason.ERROR
    assert "no token" in outputs["c"].error.message
    assert (outputs["b"].finish_reason, outputs["b"].new_token_ids) == (None, [3])
    scheduler.check_invariants()
    assert sorted(scheduler.schedule().finished_request_ids) == ["a", "c"]


def test_a_plan_that_raised_starts_anew_one_request_at_a_time() -> None:
    scheduler = small()
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add_request(make_request(name, [token] * 8))
    fault = RequestFault("the kernels raised")
    plan = scheduler.schedule()
    assert scheduler.step_failed([*plan.num_scheduled_tokens, "unknown"], ["gone"], fault) == []
    scheduler.check_invariants()
    scheduler.add_request(make_request("d", [1] * 8))
    plan = scheduler.schedule()
    assert plan.finished_request_ids == ["gone", "c", "b", "a"]
    assert plan.num_scheduled_tokens == {"a": 8}  # from the start: its blocks hold anything
    scheduler.update(plan, answer(plan))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 8}
    (output,) = scheduler.step_failed(list(plan.num_scheduled_tokens), [], fault)
    assert (output.request_id, output.finish_reason, output.error) == ("b", FinishReason.ERROR, fault)
    scheduler.check_invariants()
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 9 - 8}  # its first blocks were computed by a step that came back
    scheduler.update(plan, answer(plan))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "c": 8, "d": 4}  # requests that are no suspects may start too


def test_abort_waiting_running_and_unknown() -> None:
    scheduler = small(max_num_seqs=1)
    scheduler.add_request(make_request("a", [1]))
    scheduler.add_request(make_request("b", [1]))
    scheduler.schedule()
    outputs = scheduler.abort(["b", "a", "a", "unknown"])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("b", FinishReason.ABORT), ("a", FinishReason.ABORT)]
    assert outputs[0].facts is not None
    assert outputs[0].facts.scheduled_time is None
    assert scheduler.has_requests()  # the worker still knows "a"
    assert scheduler.schedule().finished_request_ids == ["a"]
    assert not scheduler.has_requests()


def test_misuse_is_named() -> None:
    scheduler = small()
    scheduler.add_request(make_request("a", [1]))
    with pytest.raises(ValidationError, match="'a' is in use"):
        scheduler.add_request(make_request("a", [1]))
    plan = scheduler.schedule()
    with pytest.raises(InvariantError, match="result of step 7 for the plan of step 0"):
        scheduler.update(plan, ModelRunnerOutput(step_id=7))


def test_stats_and_times() -> None:
    now = iter(range(100))
    scheduler = make_scheduler(SchedulerConfig(), cache_config(4), 11, 100, clock=lambda: float(next(now)))
    scheduler.add_request(make_request("a", [1] * 6))
    plan = scheduler.schedule()
    update = scheduler.update(plan, answer(plan))
    output, stats = update.outputs[0], update.stats
    facts = output.facts
    assert facts is not None
    assert facts.queued_time is not None
    assert facts.scheduled_time is not None
    assert facts.queued_time < facts.scheduled_time < update.timestamp
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.iteration_tokens) == (1, 0, 11, 6)
    assert (stats.kv_cache_usage, stats.prefix_cache_queries_delta, stats.step_seconds) == (0.2, 6, 1.0)
    assert scheduler.stats().prefix_cache_queries_delta == 0


def test_broken_bookkeeping_is_found() -> None:
    scheduler = small()
    scheduler.add_request(make_request("a", [1] * 6))
    scheduler.schedule()
    scheduler._kv.pool.blocks[1].ref_count += 1
    with pytest.raises(InvariantError, match=r"Block\(1, refs=2.*in 1 block tables"):
        scheduler.check_invariants()
