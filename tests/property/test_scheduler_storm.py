"""Long random runs in pools that are far too small: what short examples cannot reach."""

from __future__ import annotations

import random

import pytest

from octavo.config import SchedulerConfig
from octavo.core.fair import FairPolicy
from octavo.core.policy import FcfsPolicy, Policy
from octavo.core.priority import PriorityPolicy
from octavo.messages import BeamSearch, EngineCoreRequest, FinishReason, Tenant
from tests.core.checking_worker import VOCAB, Loop, cache_config, make_request
from tests.core.kv_parts import host_tier
from tests.core.policies import ByPriority, SortedByPriority
from tests.pairwise import pairwise

POLICIES = [FcfsPolicy, PriorityPolicy, FairPolicy, ByPriority, SortedByPriority]


def make_loop(depth: int, policy: type[Policy], chunked: bool, seed: int, tier: str) -> Loop:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=48,
        enable_chunked_prefill=chunked,
        longest_prefix_first=2 if seed in (1, 4, 8) else 0,
    )
    index = "radix" if seed in (1, 3, 4, 5, 8) else "hash"
    cache = cache_config(4, enable_prefix_caching=seed not in (2, 6), prefix_index=index)
    sizes = {"none": (0, 0), "host": (40, 0), "swap": (40, 0), "disk": (0, 60), "both": (10, 60)}[tier]
    return Loop(
        config,
        cache,
        num_blocks=24,
        max_model_len=90,
        depth=depth,
        policy=policy(config),
        tiers=host_tier(sizes[0], swaps=tier in ("swap", "both"), disk=sizes[1]),
        num_drafts=3 if seed % 2 else 0,
    )


def random_request(rng: random.Random, name: str, texts: list[list[int]], *, searches: bool) -> EngineCoreRequest:
    """A prompt that begins like one of ``texts``; ``searches``: for beams."""
    prompt = rng.choice(texts)[: rng.randint(1, 40)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
    n = rng.choice([1, 1, 1, 2, 5, 12])
    return make_request(
        name,
        prompt,
        eos=rng.random() < 0.2,
        salt=rng.choice([None, None, "a"]),
        priority=rng.randrange(3),
        tenant=Tenant(rng.choice("ab"), rng.choice([1.0, 3.0]), rng.choice([None, None, 2])),
        max_tokens=rng.choice([1, 10, 10 if searches else 40]),
        prompt_logprobs=None if searches else rng.choice([None, None, None, 0]),
        n=min(n, 5) if searches else n,
        beam_search=BeamSearch(beam_width=rng.choice([5, 9])) if searches else None,
    )


# A seed is a setting too: of the prefix index, tiers, drafts, beams and steps that raise. So every policy, depth and
# way of prefill meets each of them; what depends on three of them, the 80 requests of a run meet by themselves.
@pytest.mark.parametrize(("depth", "policy", "chunked", "seed"), pairwise([1, 2, 3], POLICIES, [True, False], range(9)))
def test_storm(depth: int, policy: type[Policy], chunked: bool, seed: int) -> None:
    rng = random.Random(f"{depth} {policy.__name__} {chunked} {seed}")
    steps_raise = seed == 3
    tier = ("none", "none", "none", "none", "host", "swap", "swap", "disk", "both")[seed]
    texts = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    loop = make_loop(depth, policy, chunked, seed, tier)
    preemptions = cached = 0
    for number in range(80):
        loop.add(random_request(rng, f"r{number}", texts, searches=seed in (1, 3, 5, 7) and rng.random() < 0.15))
        if rng.random() < 0.1:
            loop.abort([rng.choice(list(loop.requests))])
        if rng.random() < 0.1:
            loop.worker.failing.add(rng.choice(list(loop.requests)) + rng.choice(["", "", "/2.1"]))
        if steps_raise and rng.random() < 0.3:
            loop.raising = rng.choice(["before", "after"])
        if seed in (4, 5, 8) and rng.random() < 0.1:
            loop.worker.losing = 1
        for _ in range(rng.randrange(6)):
            loop.step()
    loop.run()
    loop.check_results()
    for request_id, received in loop.received.items():
        assert received.finish_reason in set(FinishReason)
        if received.finish_reason is FinishReason.ERROR:
            first = request_id.split(".")[0] + ".0"  # until the prompt is computed, all samples fail with it
            guilty = {name.split("/")[0] for name in loop.worker.failing} | loop.blamed  # a beam, all of its search
            assert request_id in guilty or (first in guilty and not received.tokens)
        preemptions += received.facts.num_preemptions
        cached += received.facts.num_cached_tokens
    assert preemptions > 0, "the pool is not small enough"
    assert (cached > 0) == (seed not in (2, 6))
    assert (loop.num_right > 0) == (seed % 2 == 1 and depth == 1)
    assert loop.num_right <= loop.num_tried
    assert (loop.worker.num_loads > 0) == (tier != "none")
