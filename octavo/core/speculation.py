"""Speculation: drafts take what a plan has left over, and are judged by what the worker sampled.

    known tokens  | ... t8 t9 |           a plan without drafts computes t9 and samples t10
    with drafts   | ... t9 d10 d11 d12    computes all four and samples t10; if t10 is d10, t11; if t11 is d11, t12 ...

Blocks that were taken for wrong drafts stay in the request's table: its next tokens go there. A draft is no known token
until the model has confirmed it, so no block of it has a name in the prefix cache. Where drafts come from is not known
here.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.kv_cache.groups import KVManager
from octavo.core.policy import Policy
from octavo.core.request import Request, RequestStatus
from octavo.core.stats import SchedulerCounters
from octavo.core.step import Scheduled, StepBuilder
from octavo.messages import ModelRunnerOutput


def plan_drafts(step: StepBuilder, kv: KVManager, policy: Policy) -> None:
    """Let the requests that are sampled try their drafts, in order, in what is left of the step's tokens and blocks.

    None goes beyond its last possible token, and nobody gives way.
    """
    for entry in step.scheduled:
        request = entry.request
        if not entry.samples or entry.end != request.num_tokens:
            continue  # its last known token is not computed, or is not its last one: steps in flight sample others
        drafts = request.drafts.after(request.num_tokens, min(step.tokens_left, request.limit - request.num_tokens - 1))
        if drafts and (room := kv.extend(request, len(drafts))) is not None:
            step.speculate(entry, drafts, room)
            policy.served(request, len(drafts))


def judge_drafts(entry: Scheduled, result: ModelRunnerOutput, policy: Policy, counters: SchedulerCounters) -> None:
    """Take back what ``entry``, which tried drafts, computed of wrong ones. Before its tokens are taken in."""
    request, num_tried = entry.request, len(entry.draft_token_ids)
    num_right = len(result.sampled_token_ids[request.request_id]) - 1
    request.retract(num_tried - num_right)
    request.drafts.judge(request.num_tokens, num_tried, num_right)
    policy.served(request, num_right)
    counters.count_drafts(num_tried, num_right)


def offer_drafts(result: ModelRunnerOutput, requests: Mapping[str, Request]) -> None:
    """Keep what ``result`` guesses of running requests for the next plan. After its tokens are taken in."""
    for request_id, token_ids in result.draft_token_ids.items():
        request = requests.get(request_id)
        if request is not None and request.status is RequestStatus.RUNNING:
            request.drafts.offer(token_ids, request.num_tokens)
