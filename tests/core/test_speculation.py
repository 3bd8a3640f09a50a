"""Drafts in the scheduler: what they may take, when they are tried, and what is left of wrong ones."""

from __future__ import annotations

import dataclasses

from octavo.config import SchedulerConfig, SpeculativeConfig
from octavo.core.drafts import Drafts
from octavo.core.factory import make_scheduler
from octavo.core.scheduler import Scheduler
from octavo.messages import ModelRunnerOutput, SchedulerOutput
from tests.core.checking_worker import cache_config, make_request

SPECULATIVE = SpeculativeConfig(method="ngram", num_speculative_tokens=4, disable_by_batch_size=2)
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12, speculative_config=SPECULATIVE)
GUESS = [7, 7, 7, 7]


def speculating(num_blocks: int = 100, **changes: object) -> Scheduler:
    return make_scheduler(dataclasses.replace(CONFIG, **changes), cache_config(4), num_blocks, 1000)


def answer(scheduler: Scheduler, plan: SchedulerOutput, *sampled: list[int]) -> None:
    """The result of ``plan``: what was sampled of each request, in its order; and four sevens are the guess at more."""
    tokens = dict(zip(plan.num_scheduled_tokens, sampled, strict=True))
    drafts = dict.fromkeys(tokens, GUESS)
    scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=tokens, draft_token_ids=drafts))
    scheduler.check_invariants()


def test_drafts_are_as_long_as_the_last_ones_were_right() -> None:
    drafts, position, tried = Drafts(), 10, []
    for num_right in (4, 4, 1, 1, 2, 0):
        drafts.offer(GUESS, position)
        tried.append(len(drafts.after(position, 4)))
        drafts.judge(position, tried[-1], min(num_right, tried[-1]))
        position += 1 + min(num_right, tried[-1])
    assert tried == [4, 4, 4, 1, 2, 4]
    drafts.offer(GUESS, position)
    assert not drafts.after(position, 4), "it failed a token ago"
    drafts.offer(GUESS, position + 1)
    assert len(drafts.after(position + 1, 4)) == 1
    assert not drafts.after(position + 2, 4), "that is behind other tokens"
    assert not drafts.after(position + 1, 0)
    assert not drafts.after(position + 1, -3)


def test_a_step_computes_the_last_token_and_its_drafts() -> None:
    scheduler = speculating()
    scheduler.add_request(make_request("r", [1, 2, 3], max_tokens=20))
    answer(scheduler, scheduler.schedule(), [4])
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"r": 5}
    assert plan.draft_token_ids == {"r": GUESS}
    assert len(plan.cached_requests[0].new_block_ids) == 1  # for tokens 4 .. 7
    answer(scheduler, plan, [7, 7, 9])
    (request,) = scheduler._running
    assert request.token_ids == [1, 2, 3, 4, 7, 7, 9]
    assert request.num_computed_tokens == request.num_confirmed_tokens == 6
    plan = scheduler.schedule()
    assert plan.cached_requests[0].num_computed_tokens == 6
    assert plan.draft_token_ids == {"r": [7, 7]}
    assert len(plan.cached_requests[0].new_block_ids) == 1


def test_prompts_come_before_drafts() -> None:
    scheduler = speculating()
    scheduler.add_request(make_request("r", [1, 2, 3]))
    answer(scheduler, scheduler.schedule(), [4])
    scheduler.add_request(make_request("s", [5] * 9))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"r": 3, "s": 9}
    assert plan.draft_token_ids == {"r": [7, 7]}


def test_nobody_gives_way_for_a_draft() -> None:
    """Of five blocks each request has two, and one is left."""
    scheduler = speculating(num_blocks=6)
    for name in "rs":
        scheduler.add_request(make_request(name, [ord(name)] * 6, max_tokens=8))
    answer(scheduler, scheduler.schedule(), [4], [4])
    plan = scheduler.schedule()
    assert plan.draft_token_ids == {"r": GUESS}
    assert plan.num_scheduled_tokens == {"r": 5, "s": 1}
    assert scheduler.num_running == 2


def test_a_draft_ends_where_its_request_does() -> None:
    scheduler = speculating()
    scheduler.add_request(make_request("r", [1, 2, 3], max_tokens=4))
    answer(scheduler, scheduler.schedule(), [4])
    plan = scheduler.schedule()
    assert plan.draft_token_ids == {"r": [7, 7]}  # the fourth token is sampled behind these
    answer(scheduler, plan, [7, 7, 7])
    assert scheduler.num_running == 0


def test_what_follows_a_stop_is_dropped() -> None:
    scheduler = speculating()
    scheduler.add_request(make_request("r", [1, 2, 3], stop_token_ids=[7]))
    answer(scheduler, scheduler.schedule(), [4])
    plan = scheduler.schedule()
    result = ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids={"r": [7, 7, 7, 7, 9]})
    (output,) = scheduler.update(plan, result).outputs
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([7], "stop", 7)
    scheduler.check_invariants()


def test_large_steps_try_none() -> None:
    scheduler = speculating()
    for name in "rst":
        scheduler.add_request(make_request(name, [1, 2, ord(name)]))
    answer(scheduler, scheduler.schedule(), [4], [4], [4])
    plan = scheduler.schedule()
    assert plan.draft_token_ids == {}
    scheduler.abort(["s"])
    answer(scheduler, plan, [5], [5], [5])
    assert scheduler.schedule().draft_token_ids == {"r": GUESS, "t": GUESS}


def test_drafts_of_an_older_step_are_not_tried() -> None:
    """Two steps in flight: the drafts of the first one are behind a token that the second one has moved on from."""
    scheduler = speculating()
    scheduler.add_request(make_request("r", [1, 2, 3], max_tokens=20))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"r": 1}
    answer(scheduler, first, [4])
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"r": 1}
    assert third.draft_token_ids == {}
    answer(scheduler, second, [5])
    answer(scheduler, third, [6])
    fourth = scheduler.schedule()
    assert fourth.draft_token_ids == {"r": GUESS}
    assert scheduler.schedule().is_empty, "it is not known yet what the next step begins with"


def test_the_report_counts_by_place() -> None:
    scheduler = speculating()
    for name in "rs":
        scheduler.add_request(make_request(name, [1, 2, ord(name)], max_tokens=20))
    answer(scheduler, scheduler.schedule(), [4], [4])
    plan = scheduler.schedule()
    tokens = {"r": [7, 7, 1], "s": [7, 2]}
    stats = scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=tokens)).stats
    assert stats is not None
    assert (stats.num_drafts_delta, stats.num_draft_tokens_delta) == (2, 8)
    assert stats.accepted_per_position_delta == [2, 1]
    assert scheduler.stats().num_drafts_delta == 0
