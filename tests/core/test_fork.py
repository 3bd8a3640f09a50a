"""n > 1: the prompt is computed once, its blocks are shared, and a write into a shared one goes to a copy."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.core.factory import make_scheduler
from octavo.core.request import Request
from octavo.core.sample_group import SOLO, Samples
from octavo.exceptions import ValidationError
from octavo.messages import FinishReason, ModelRunnerOutput, OutputOptions, RepetitionDetectionParams, SchedulerOutput
from tests.core.checking_worker import Loop, cache_config, expected_output, make_request

PROMPT = list(range(10))  # blocks of 4: two full ones and half of a third

COPIED = {"_is_counted", "block_hashes", "facts", "num_prompt_tokens", "token_ids"}
"""What Request.fork does with each slot of a Request: these are its parent's,"""

FRESH = {
    *("_packed", "_repetition", "_told_facts", "drafts", "epoch", "number", "status"),
    *("num_computed_tokens", "num_confirmed_tokens", "num_drafts", "num_placeholders", "num_prompt_logprobs"),
}
"""these are those of a new request,"""

DERIVED = {"_eos_token_ids", "_stop_token_ids", "limit", "request_id", "sample_group", "sampling_params", "source"}
"""and these come of the arguments of fork."""


def loop_of(*, num_blocks: int = 40, max_num_seqs: int = 8, caching: bool = False, depth: int = 1) -> Loop:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    cache = cache_config(4, enable_prefix_caching=caching)
    return Loop(config, cache, num_blocks=num_blocks, max_model_len=60, depth=depth)


def num_computed(plans: list[SchedulerOutput]) -> int:
    return sum(plan.total_num_scheduled_tokens for plan in plans)


def run(loop: Loop) -> list[SchedulerOutput]:
    plans = []
    execute = loop.worker.execute

    def listen(plan: SchedulerOutput) -> ModelRunnerOutput:
        plans.append(plan)
        return execute(plan)

    loop.worker.execute = listen  # type: ignore[method-assign]
    loop.run()
    loop.check_results()
    return plans


def seen(request: Request, slot: str) -> object:
    """The value of a slot; a part that has slots of its own is shown as their values."""
    value = getattr(request, slot)
    return [getattr(value, name) for name in value.__slots__] if slot in ("_repetition", "drafts") else value


def test_each_slot_of_a_fork_is_the_parents_or_a_new_requests_or_what_fork_was_told() -> None:
    """A new slot fails this until it is named above, and so does a named one that fork forgets."""
    repeats = RepetitionDetectionParams(max_pattern_size=3, min_count=9)
    parent = Request(make_request("p", PROMPT, repetition_detection=repeats), SOLO, limit=20, queued_time=1.0)
    parent.start(4, 2.0)
    parent.preempt()
    parent.start(4, 3.0)
    parent.confirm(4)
    parent.advance(6)
    parent.append(7)
    parent.output([7])
    parent.speculate(2)
    parent.num_prompt_logprobs = 3
    parent.hashes(4)
    parent.packed()
    asked = make_request("c", PROMPT[:2], repetition_detection=repeats, stop_token_ids=[5])
    source, group = msgspec.structs.replace(asked, output=OutputOptions(eos_token_ids=[3])), Samples([])
    child = parent.fork(source, group, limit=30)
    fresh = Request(source, group, limit=30, queued_time=0.0)
    assert child.number < fresh.number, "the later it was made"
    fresh.number = child.number
    assert sorted(COPIED | FRESH | DERIVED) == sorted(Request.__slots__)
    for slot in Request.__slots__:
        expected, other = (parent, fresh) if slot in COPIED else (fresh, parent)
        assert seen(child, slot) == seen(expected, slot), slot
        assert seen(child, slot) != seen(other, slot), slot
    parent.append(8)
    parent.hashes(4)
    assert (len(child.token_ids), len(child.block_hashes)) == (11, 2), "lists of its own"


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_the_prompt_is_computed_once_and_every_block_is_shared(caching: bool) -> None:
    loop = loop_of(caching=caching)
    loop.add(make_request("r", PROMPT, n=4, max_tokens=3))
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"r.0": 10}
    assert plan.new_requests[0].siblings == {"r.1": 1, "r.2": 2, "r.3": 3}
    assert [len(received.tokens) for received in loop.received.values()] == [1, 1, 1, 1]
    kv = loop.scheduler._kv
    assert kv.pool.num_usable - kv.pool.num_free == 3
    assert [block.ref_count for block in kv.pool.blocks[1:4]] == [4, 4, 4]
    plan = loop.step()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"r.0": 1, "r.1": 1, "r.2": 1, "r.3": 1}
    # the first three to write get a copy of block 3; the last one is alone with it by then
    assert plan.block_copies == [(3, 4), (3, 5), (3, 6)]
    (cached,) = plan.cached_requests
    assert (cached.new_block_ids, cached.num_replaced) == ([4], 1)
    assert [(new.request_id, new.num_computed_tokens, new.block_ids) for new in plan.new_requests] == [
        ("r.1", 10, [1, 2, 5]),
        ("r.2", 10, [1, 2, 6]),
        ("r.3", 10, [1, 2, 3]),
    ]
    plans = run(loop)
    assert num_computed(plans) == 4  # one more token each: the last one of an answer is never computed
    assert kv.pool.num_free == kv.pool.num_usable


def test_a_prompt_that_ends_with_a_block_needs_no_copy() -> None:
    loop = loop_of()
    loop.add(make_request("r", PROMPT[:8], n=3, max_tokens=6))
    plans = run(loop)
    assert all(not plan.block_copies for plan in plans)
    assert num_computed(plans) == 8 + 3 * 5
    assert {tuple(new.block_ids[:2]) for plan in plans for new in plan.new_requests} == {(1, 2)}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_more_samples_than_places_run_in_waves_and_share_the_prompt(depth: int, caching: bool) -> None:
    loop = loop_of(max_num_seqs=3, caching=caching, depth=depth)
    loop.add(make_request("r", PROMPT, n=10, max_tokens=5))
    plans = run(loop)
    assert all(len(plan.num_scheduled_tokens) <= 3 for plan in plans)
    assert num_computed(plans) == 10 + 10 * 4
    assert len(loop.received) == 10


def test_a_place_is_kept_for_each_sample() -> None:
    loop = loop_of(max_num_seqs=4)
    loop.add(make_request("r", PROMPT, n=3, max_tokens=3))
    for name in ("a", "b"):
        loop.add(make_request(name, [1], max_tokens=9))
    plans = [loop.step(), loop.step()]
    assert [list(plan.num_scheduled_tokens) for plan in plans if plan] == [["r.0", "a"], ["r.0", "a", "r.1", "r.2"]]
    loop.run()
    loop.check_results()


def test_children_end_with_their_first_token() -> None:
    loop = loop_of()
    loop.add(make_request("r", PROMPT, n=3, max_tokens=1))
    loop.step()
    assert [received.finish_reason for received in loop.received.values()] == [FinishReason.LENGTH] * 3
    assert num_computed(run(loop)) == 0


def test_each_child_ends_alone() -> None:
    """A19: one sample meets its stop token early; the others go on."""
    samples = make_request("r", PROMPT, n=4, max_tokens=12).samples()
    alone = [expected_output(sample, 60)[0] for sample in samples]
    stop = next(token for token in alone[2] if token not in alone[0] + alone[1] + alone[3])
    loop = loop_of()
    loop.add(make_request("r", PROMPT, n=4, max_tokens=12, stop_token_ids=[stop]))
    run(loop)
    assert [len(received.tokens) for received in loop.received.values()] == [12, 12, alone[2].index(stop) + 1, 12]
    assert [str(received.finish_reason) for received in loop.received.values()] == [
        "length",
        "length",
        "stop",
        "length",
    ]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_abort_of_all_samples_frees_everything(after: int) -> None:
    loop = loop_of(max_num_seqs=2)
    loop.add(make_request("r", PROMPT, n=4, max_tokens=30))
    loop.add(make_request("other", PROMPT, max_tokens=4))
    for _ in range(after):
        loop.step()
    loop.abort(["r.0", "r.1", "r.2", "r.3"])
    ends = [received.finish_reason for name, received in loop.received.items() if name != "other"]
    assert ends == [FinishReason.ABORT] * 4
    loop.scheduler.check_invariants()
    loop.run()
    loop.check_results()
    assert loop.received["other"].finish_reason is FinishReason.LENGTH


def test_until_the_prompt_is_computed_the_samples_are_one_request() -> None:
    loop = loop_of()
    loop.add(make_request("r", PROMPT, n=3))
    loop.abort(["r.1"])
    assert loop.received["r.1"].finish_reason is FinishReason.ABORT
    loop.abort(["r.0"])
    assert {received.finish_reason for received in loop.received.values()} == {FinishReason.ABORT}
    assert not loop.scheduler.has_requests()

    loop.add(make_request("s", PROMPT, n=3))
    loop.worker.failing.add("s.0")
    loop.step()
    assert {loop.received[f"s.{i}"].finish_reason for i in range(3)} == {FinishReason.ERROR}
    loop.run()


def test_a_sample_aborted_before_its_birth_is_not_born() -> None:
    loop = loop_of()
    loop.add(make_request("r", PROMPT, n=3))
    loop.abort(["r.1"])
    loop.run()
    loop.check_results()
    ends = [received.finish_reason for received in loop.received.values()]
    assert ends == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_preempted_children_are_ordinary_requests(caching: bool, depth: int) -> None:
    loop = loop_of(num_blocks=11, caching=caching, depth=depth)
    loop.add(make_request("r", PROMPT, n=4, max_tokens=12))
    loop.run()
    loop.check_results()
    assert sum(received.facts.num_preemptions for received in loop.received.values()) > 0


def test_blocks_of_waiting_children_are_taken_before_anybody_is_preempted() -> None:
    loop = loop_of(num_blocks=8, max_num_seqs=2)
    loop.add(make_request("a", PROMPT[:4], max_tokens=12))
    loop.add(make_request("r", PROMPT, n=2, max_tokens=1))  # takes the other place and ends at once
    loop.run()
    loop.add(make_request("first", PROMPT[:3], max_tokens=20))
    loop.add(make_request("r2", PROMPT, n=6, max_tokens=2))
    plans = run(loop)
    assert all(received.facts.num_preemptions == 0 for name, received in loop.received.items() if name == "first")
    assert num_computed(plans) >= 3 + 19 + 10 + 6


def test_prompt_logprobs_come_once() -> None:
    loop = loop_of(caching=True)
    loop.add(make_request("r", PROMPT, n=3, prompt_logprobs=0, max_tokens=3))
    loop.run()
    loop.check_results()
    assert [len(received.prompt_logprobs) for received in loop.received.values()] == [9, 0, 0]


def test_names_of_samples_are_in_use() -> None:
    scheduler = make_scheduler(SchedulerConfig(), cache_config(4), 40, 60)
    scheduler.add_request(make_request("r", PROMPT, n=3))
    for name in ("r.0", "r.2"):
        with pytest.raises(ValidationError, match="in use"):
            scheduler.add_request(make_request(name, [1]))
    scheduler.add_request(make_request("r", PROMPT))  # another name


def test_the_prefix_cache_is_asked_once_for_all_samples() -> None:
    loop = loop_of(caching=True)
    loop.add(make_request("r", PROMPT, n=4, max_tokens=8))
    queries = 0
    while loop.scheduler.has_requests():
        plan = loop.scheduler.schedule()
        stats = loop.scheduler.update(plan, loop.worker.execute(plan)).stats
        assert stats is not None
        queries += stats.prefix_cache_queries_delta
    assert queries == len(PROMPT)
