"""Limits of tenants at the door, and what the metrics tell."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from octavo.config import TenantLimits, TenantTable
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.tenants import MAX_BUCKETS, Tenants, TokenBucket
from octavo.exceptions import OverloadedError, ValidationError
from octavo.messages import SamplingParams, SchedulingOptions, Tenant

from .tiny_llama import make_config


def of(tenant: str, priority: int = 0) -> SchedulingOptions:
    return SchedulingOptions(priority=priority, tenant=Tenant(tenant))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_at_its_rate_and_may_be_overdrawn() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.is_full
    bucket.use(59)
    assert bucket.wait() == 0
    bucket.use(11)
    assert bucket.wait() == pytest.approx(11)
    clock.now += 10.5
    assert bucket.wait() == pytest.approx(0.5)
    clock.now += 1000
    assert bucket.is_full
    bucket.use(60)
    assert bucket.wait() == pytest.approx(1)


def test_each_limit_is_named() -> None:
    clock = Clock()
    limits = TenantLimits(max_queued=2, tokens_per_minute=60)
    tenants = Tenants(TenantTable(listed={"a": limits}), clock)
    tenants.check("a", 8)  # nothing waits: any request is let in whole
    tenants.queue("a", 2)
    with pytest.raises(
        OverloadedError, match="2 sequences of this tenant are waiting, and its max_queued is 2"
    ) as full:
        tenants.check("a", 1)
    assert full.value.reason == "tenant_max_queued"
    tenants.check("b", 100)
    tenants.queue("a", -2)
    tenants.use("a", 65)
    with pytest.raises(OverloadedError, match=r"tokens_per_minute, 60; .* in 6\.0 s") as used:
        tenants.check("a", 1)
    assert (used.value.reason, used.value.retry_after) == ("tenant_tokens_per_minute", pytest.approx(6))
    clock.now += 6
    tenants.check("a", 1)


def test_each_unlisted_tenant_has_the_default_for_itself_and_memory_is_bounded() -> None:
    clock = Clock()
    tenants = Tenants(TenantTable(default=TenantLimits(tokens_per_minute=60)), clock)
    tenants.use("a", 100)
    with pytest.raises(OverloadedError):
        tenants.check("a", 1)
    for number in range(3 * MAX_BUCKETS):
        tenants.check(f"t{number}", 1)
    assert len(tenants._buckets) <= MAX_BUCKETS
    with pytest.raises(OverloadedError):
        tenants.check("a", 1)


def test_another_table_holds_from_now_on() -> None:
    """What was used of a minute stays used; names that are new have no label of their own in the metrics."""
    clock = Clock()
    slow, quick = TenantLimits(tokens_per_minute=60, max_tokens=9), TenantLimits(tokens_per_minute=600)
    tenants = Tenants(TenantTable(listed={"a": slow, "b": slow}), clock)
    for name in "ab":
        tenants.use(name, 90)
    tenants.replace(TenantTable(listed={"a": TenantLimits(tokens_per_minute=60, weight=2.0), "b": quick, "c": quick}))
    with pytest.raises(OverloadedError):
        tenants.check("a", 1)
    tenants.check("b", 1)
    assert tenants.bound(SamplingParams(max_tokens=50), of("a", 0), explicit=True).max_tokens == 50
    assert tenants.tenant("a").weight == 2.0
    assert tenants.labels == ("a", "b", "other")
    assert [tenants.label(name) for name in "abc"] == ["a", "b", "other"]


def test_max_tokens_and_priority() -> None:
    limits = TenantLimits(max_tokens=10, priority=(0, 5))
    tenants = Tenants(TenantTable(listed={"a": limits}))
    long = SamplingParams(max_tokens=50)
    assert tenants.bound(long, of("b", -9), explicit=True).max_tokens == 50
    assert tenants.bound(long, of("a", 0), explicit=False).max_tokens == 10
    with pytest.raises(ValidationError, match="max_tokens must be at most 10 for this tenant, got 50"):
        tenants.bound(long, of("a", 0), explicit=True)
    with pytest.raises(ValidationError, match=r"priority must be in \[0, 5\] for this tenant, got -1"):
        tenants.bound(long, of("a", -1), explicit=False)


def test_labels_are_those_of_the_table_and_other() -> None:
    tenants = Tenants(TenantTable(listed={"a": TenantLimits()}))
    assert tenants.labels == ("a", "other")
    assert [tenants.label(name) for name in ("a", "b", "")] == ["a", "other", "other"]
    assert tenants.tenant("b") == Tenant("b", 1.0, None)


async def test_the_engine_knows_whose_tokens_they_are(tiny_model: str) -> None:
    table = TenantTable(listed={"a": TenantLimits(weight=2.0, max_running=1, tokens_per_minute=100)})
    config = make_config(tiny_model, scheduling_policy="fair", max_num_seqs=4)
    engine = await AsyncLLM.create(config, tenants=table)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    most = {"a": 0, "b": 0}
    now = {"a": 0, "b": 0}

    async def run(tenant: str) -> None:
        async with aclosing(engine.generate([5, 6, 7], params, scheduling=of(tenant))) as stream:
            first = True
            async for output in stream:
                if first:
                    now[tenant] += 1
                    most[tenant] = max(most[tenant], now[tenant])
                    first = False
                if output.finished:
                    now[tenant] -= 1

    try:
        await asyncio.gather(*(run(tenant) for tenant in "aabbb"))
        assert most["a"] == 1  # max_running
        assert most["b"] > 1
        with pytest.raises(OverloadedError, match="tokens_per_minute") as used:
            await asyncio.gather(*(run("a") for _ in range(40)))
        assert used.value.reason == "tenant_tokens_per_minute"
        text = engine.render_metrics().decode()
        assert 'octavo:tenant_generation_tokens_total{engine="0",model_name="tiny",tenant="other"} 90.0' in text
        assert 'octavo:tenant_prompt_tokens_total{engine="0",model_name="tiny",tenant="other"} 9.0' in text
    finally:
        await engine.shutdown()
