"""Pins, listing, eviction, saving and restoring of prefixes, through the scheduler and a worker that distrusts it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.config import SchedulerConfig
from octavo.core.factory import pin_limits
from octavo.core.kv_cache.pins import PinLimits
from octavo.messages import (
    Answer,
    CachePin,
    EvictPrefixes,
    ListPrefixes,
    NotFound,
    PinEnded,
    PinInfo,
    PrefixList,
    Query,
    RemovePin,
    ResetCache,
    RestorePrefix,
    SavePrefixes,
    SetPin,
    Tenant,
)
from tests.core.checking_worker import Loop, cache_config, make_request
from tests.core.kv_parts import host_tier

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40)
SYSTEM = [3, 1, 4, 1, 5, 9, 2, 6]  # two blocks of 4


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_loop(clock: Clock) -> Callable[..., Loop]:
    def make(num_blocks: int = 41, max_model_len: int = 60, share: float = 0.5, **more: object) -> Loop:
        cache = cache_config(4)
        object.__setattr__(cache, "max_pinned_share", share)
        return Loop(CONFIG, cache, num_blocks=num_blocks, max_model_len=max_model_len, clock=clock, **more)  # type: ignore[arg-type]

    return make


def run(loop: Loop, name: str, prompt: list[int], **more: object) -> int:
    """Run one request alone; the number of its tokens that came from the cache."""
    loop.add(make_request(name, prompt, max_tokens=2, **more))  # type: ignore[arg-type]
    loop.run()
    return loop.received[name].facts.num_cached_tokens


def ask(loop: Loop, query: Query[Answer]) -> Answer:
    reply = loop.scheduler.ask(query)
    loop.scheduler.check_invariants()
    return reply.result(query)


def pin(loop: Loop, prompt: list[int], salt: str | None = None) -> PinInfo:
    """Pin a prompt for a minute."""
    answer = ask(loop, SetPin(60.0, prompt_token_ids=prompt, cache_salt=salt))
    assert isinstance(answer, PinInfo)
    return answer


def flood(loop: Loop, count: int = 8) -> None:
    """Requests of nothing but new tokens, many times what the pool holds."""
    for i in range(count):
        run(loop, f"flood{id(loop)}-{i}-{loop.scheduler._next_step_id}", [(i * 7 + k * k) % 23 for k in range(40)])


def test_a_list_of_prefixes_is_where_sequences_end_or_part(make_loop: Callable[..., Loop], clock: Clock) -> None:
    loop = make_loop()
    run(loop, "a", [*SYSTEM, 10, 11, 12, 13, 1])
    clock.now += 10
    run(loop, "b", [*SYSTEM, 20, 21, 22, 20, 2])
    run(loop, "salted", [*SYSTEM, 7], salt="s")
    reply = ask(loop, ListPrefixes(10, 5))
    assert reply.num_prefixes == 4
    assert reply.num_cached_blocks == 6
    found = {(one.num_tokens, one.salted): one for one in reply.prefixes}
    assert set(found) == {(8, False), (12, False), (8, True)}
    system = found[8, False]
    assert (system.hits, system.idle, system.num_blocks, system.num_used_blocks) == (1, 0.0, 2, 0)
    assert (system.head, system.tail) == (SYSTEM[:5], SYSTEM[5:])
    salted = found[8, True]
    assert (salted.head, salted.tail) == ([], []), "a salt keeps a prefix apart, its text too"
    (older,) = [one for one in reply.prefixes if one.idle == 10.0]
    assert older.head == SYSTEM[:5]
    assert older.tail == [6, 10, 11, 12, 13]
    assert len(ask(loop, ListPrefixes(1)).prefixes) == 1


def test_a_pinned_prefix_survives_any_flood_until_it_expires(make_loop: Callable[..., Loop], clock: Clock) -> None:
    loop = make_loop()
    run(loop, "a", [*SYSTEM, 10])
    one = pin(loop, [*SYSTEM, 11])
    assert (one.num_tokens, one.num_blocks, one.num_held, one.expires_in) == (8, 2, 2, 60.0)
    flood(loop)
    assert run(loop, "b", [*SYSTEM, 10]) == 8
    clock.now += 59
    flood(loop)
    assert run(loop, "c", [*SYSTEM, 10]) == 8
    clock.now += 1
    flood(loop)
    assert run(loop, "d", [*SYSTEM, 10]) == 0
    assert ask(loop, ListPrefixes(10)).pins == []


def test_a_pin_on_what_is_not_computed_holds_it_once_it_is(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    one = pin(loop, SYSTEM)
    assert (one.num_blocks, one.num_held) == (2, 0)
    run(loop, "a", [*SYSTEM[:5], 17, 17])
    assert ask(loop, ListPrefixes(10)).pins[0].num_held == 1
    run(loop, "b", [*SYSTEM, 10])
    assert ask(loop, ListPrefixes(10)).pins[0].num_held == 2
    flood(loop)
    assert run(loop, "c", [*SYSTEM, 10]) == 8
    assert ask(loop, RemovePin(one.pin_id)) == PinEnded()
    assert ask(loop, RemovePin(one.pin_id)) == NotFound()
    flood(loop)
    assert run(loop, "d", [*SYSTEM, 10]) == 0


def test_a_pin_of_a_core_that_is_gone_is_none_of_the_next_one(make_loop: Callable[..., Loop]) -> None:
    one, other = make_loop(), make_loop()
    pins = [pin(loop, SYSTEM) for loop in (one, other)]
    assert ask(other, RemovePin(pins[0].pin_id)) == NotFound()
    assert ask(other, RemovePin(pins[1].pin_id)) == PinEnded()


def test_a_salt_has_its_own_pins(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    pin(loop, SYSTEM, "s")
    run(loop, "a", [*SYSTEM, 10])
    assert ask(loop, ListPrefixes(10)).pins[0].num_held == 0
    run(loop, "b", [*SYSTEM, 10], salt="s")
    assert ask(loop, ListPrefixes(10)).pins[0].num_held == 2
    flood(loop)
    assert [run(loop, "c", [*SYSTEM, 10]), run(loop, "d", [*SYSTEM, 10], salt="s")] == [0, 8]


def test_what_a_failed_step_left_in_a_pinned_block_goes(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    pin(loop, SYSTEM)
    loop.worker.failing.add("bad")
    loop.add(make_request("bad", [*SYSTEM, 10], max_tokens=2))
    loop.run()
    assert ask(loop, ListPrefixes(10)).pins[0].num_held == 0
    assert run(loop, "good", [*SYSTEM, 10]) == 0
    assert ask(loop, ListPrefixes(10)).pins[0].num_held == 2


def test_pins_leave_room_for_the_longest_request() -> None:
    cache = cache_config(4)
    for num_blocks in range(2, 60):
        for max_model_len in (2, 17, 60, 400):
            limits = pin_limits(cache, num_blocks, -(-max_model_len // 4))
            usable = num_blocks - 1
            assert 0 <= limits.tenant_blocks <= limits.blocks <= usable // 4
            assert limits.blocks == 0 or (usable - limits.blocks) * 4 >= max_model_len
    off = cache_config(4, enable_prefix_caching=False)
    assert pin_limits(off, 1000, 4) == PinLimits(0, 0)


def test_the_quota_is_named(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(num_blocks=21, max_model_len=40, share=0.2)
    pin(loop, list(range(12)))
    reply = loop.scheduler.ask(SetPin(60.0, prompt_token_ids=list(range(8, 16))))
    assert reply.fault is not None
    assert reply.fault.refused
    assert "5 blocks would be pinned, and at most 4" in reply.fault.message
    pin(loop, [*range(12), 1, 1, 1, 1])  # its first three are pinned already
    short = loop.scheduler.ask(SetPin(60.0, prompt_token_ids=[1, 2, 3]))
    assert short.fault is not None
    assert "less than 4, a block" in short.fault.message


def test_requests_pin_within_the_quota_of_their_tenant(make_loop: Callable[..., Loop], clock: Clock) -> None:
    loop = make_loop(num_blocks=41, share=0.2)  # 8 blocks, 4 for one tenant
    run(loop, "a", list(range(20)), pins=[CachePin(8, 300.0), CachePin(20, 3600.0)])
    assert loop.received["a"].facts.num_pinned_tokens == 8, "the longer one is over the tenant's quota"
    (one,) = ask(loop, ListPrefixes(1)).pins
    assert (one.num_tokens, one.num_held, one.tenant, one.expires_in) == (8, 2, "", 300.0)
    clock.now += 200
    run(loop, "b", list(range(20)), pins=[CachePin(8, 300.0)])
    (one,) = ask(loop, ListPrefixes(1)).pins
    assert one.expires_in == 300.0, "the same prefix is renewed"
    clock.now += 299
    assert len(ask(loop, ListPrefixes(1)).pins) == 1, "and outlives its first time"
    clock.now += 1
    assert ask(loop, ListPrefixes(1)).pins == []
    assert run(loop, "c", [1, 2, 3], pins=[CachePin(3, 300.0)]) == 0
    assert loop.received["c"].facts.num_pinned_tokens == 0


def test_two_pins_of_a_tenant_that_hold_nothing_expire(make_loop: Callable[..., Loop], clock: Clock) -> None:
    """The only group's window is one token, so nothing before the next token is seen."""
    loop = make_loop(windows=(1,))
    run(loop, "a", [*SYSTEM, 10], pins=[CachePin(4, 1.0), CachePin(8, 1.0)])
    clock.now += 2
    assert ask(loop, ListPrefixes(1)).pins == []


def test_evicting_takes_what_follows_and_what_only_led_there(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    run(loop, "a", [*SYSTEM, *range(10, 20)])  # 8 + 8, and a part
    run(loop, "b", [*SYSTEM, 20, 21, 22, 20, 2])
    longest = next(one for one in ask(loop, ListPrefixes(10)).prefixes if one.num_tokens == 16)
    assert ask(loop, EvictPrefixes(longest.prefix)).num_blocks == 2, "the system prompt leads elsewhere too"
    assert ask(loop, EvictPrefixes(longest.prefix)) == NotFound()
    assert run(loop, "c", [*SYSTEM, *range(10, 20)]) == 8
    pin(loop, SYSTEM)
    assert ask(loop, EvictPrefixes()).num_blocks == 3
    assert run(loop, "d", [*SYSTEM, *range(10, 20)]) == 8, "pinned blocks stay"
    assert ask(loop, ResetCache()).num_blocks > 0
    assert ask(loop, ListPrefixes(10)) == PrefixList(
        prefixes=[], num_prefixes=0, pins=[], num_cached_blocks=0, num_pinned_blocks=0, max_pinned_blocks=20
    )
    assert run(loop, "e", [*SYSTEM, 10]) == 0


def test_running_requests_keep_what_is_evicted_around_them(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    loop.add(make_request("a", [*SYSTEM, 10], max_tokens=20))
    for query in (EvictPrefixes(), SetPin(60.0, prompt_token_ids=SYSTEM), EvictPrefixes(), ResetCache()):
        loop.step()
        ask(loop, query)
    loop.run()  # checks every cell and token


def test_saved_prefixes_are_restored(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(tiers=host_tier(0, swaps=False, disk=400))
    run(loop, "a", [*SYSTEM, 10])
    assert ask(loop, SavePrefixes()).num_blocks == 2
    (prefix,) = ask(loop, ListPrefixes(10)).prefixes
    assert ask(loop, SavePrefixes(prefix.prefix)).num_blocks == 2
    assert ask(loop, SavePrefixes(b"?")) == NotFound()
    flood(loop)
    loop.worker.num_loads = 0
    assert ask(loop, RestorePrefix([*SYSTEM, 11])).num_blocks == 2
    assert loop.scheduler.has_requests(), "moves wait for a plan"
    loop.run()
    assert loop.worker.num_loads == 2
    assert ask(loop, RestorePrefix(SYSTEM)).num_blocks == 0, "it is there"
    assert run(loop, "b", [*SYSTEM, 10]) == 8
    assert loop.worker.num_loads == 2


def test_without_tiers_there_is_nothing_to_save_to(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    for query, flag in ((SavePrefixes(), "--kv-cache-dir"), (RestorePrefix(SYSTEM), "--swap-space")):
        fault = loop.scheduler.ask(query).fault
        assert fault is not None
        assert fault.refused
        assert flag in fault.message


@pytest.mark.parametrize("windows", [(None, 6), (5,)])
def test_pins_keep_what_windows_see(make_loop: Callable[..., Loop], windows: tuple[int | None, ...]) -> None:
    loop = make_loop(windows=windows, num_blocks=81)
    prompt = [*SYSTEM, *range(10, 18), 3]
    pin(loop, prompt)
    run(loop, "a", prompt)
    (one,) = ask(loop, ListPrefixes(10)).pins
    assert one.num_held == one.num_blocks < 4 * len(windows)
    for _ in range(3):
        flood(loop, 12)
    assert run(loop, "b", prompt) == 16


def why(loop: Loop, name: str, prompt: list[int], **more: object) -> tuple[str, int, int]:
    run(loop, name, prompt, report=True, **more)
    miss = loop.received[name].facts.cache_miss
    assert miss is not None
    return miss.kind, miss.num_found, miss.position


def test_why_a_prompt_missed(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    long = [*SYSTEM, *range(10, 22)]
    assert why(loop, "a", long) == ("new", 0, 0)
    assert why(loop, "b", long) == ("complete", 16, 16), "the last block is needed for its logits"
    assert why(loop, "c", [*SYSTEM, 10, 11, 9, 9, 9]) == ("differs", 8, 10)
    assert why(loop, "d", [3, 1, 4, 2, 2, 2]) == ("differs", 0, 3)
    assert why(loop, "e", [*long, *range(5)]) == ("ends", 20, 20)
    assert why(loop, "f", [7, *SYSTEM]) == ("new", 0, 0)
    assert why(loop, "g", [1, 2, 3]) == ("complete", 0, 0), "less than a block"
    assert why(loop, "h", long, prompt_logprobs=0) == ("off", 0, 0)
    run(loop, "i", long)
    assert loop.received["i"].facts.cache_miss is None, "nobody asked"


def test_a_report_tells_nothing_of_others(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    long = [*SYSTEM, *range(10, 22)]
    run(loop, "theirs", long, tenant=Tenant("a"))
    almost = [*SYSTEM, 10, 11, 9, 9, 9]
    assert why(loop, "mine", almost, tenant=Tenant("b")) == ("ends", 8, 8), (
        "whole blocks are shared, and no more is said"
    )
    assert why(loop, "guess", [3, 1, 4, 2, 2, 2], tenant=Tenant("b")) == ("new", 0, 0)
    assert why(loop, "own", almost, tenant=Tenant("a")) == ("complete", 12, 12)
    assert why(loop, "salted", [3, 1, 4, 2, 2, 2], tenant=Tenant("a"), salt="s") == ("new", 0, 0)
