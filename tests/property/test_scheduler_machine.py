"""Any mix of requests, pool sizes, chunking, preemption, sharing, aborts and steps in flight gives the same tokens."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.config import SchedulerConfig
from octavo.core.fair import FairPolicy
from octavo.core.policy import FcfsPolicy
from octavo.core.priority import PriorityPolicy
from octavo.exceptions import ValidationError
from octavo.messages import (
    BeamSearch,
    CachePin,
    EngineCoreRequest,
    EvictPrefixes,
    FinishReason,
    ListPrefixes,
    NotFound,
    RemovePin,
    ResetCache,
    RestorePrefix,
    SavePrefixes,
    SetPin,
    Tenant,
)
from tests.core.checking_worker import VOCAB, Loop, cache_config, make_request
from tests.core.kv_parts import host_tier
from tests.core.policies import ByPriority, SortedByPriority
from tests.core.test_cache_queries import ask

# Prompts are cut out of a few texts, so that many share a beginning.
TEXTS = [[(3 * i + 7 * text) % VOCAB for i in range(40)] for text in range(2)]
POLICIES = [FcfsPolicy, PriorityPolicy, FairPolicy, ByPriority, SortedByPriority]

WINDOWS = [(None,), (None,), (5,), (1,), (None, 4), (7, 2, None)]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    text = draw(st.sampled_from(TEXTS))
    return text[: draw(st.sampled_from([1, 3, 8, 16, 17, 30]))] + draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    num_seqs = draw(st.integers(1, 5))
    config = SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=draw(st.integers(num_seqs, 40)),
        enable_chunked_prefill=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 5])),
        longest_prefix_first=draw(st.sampled_from([0, 0, 1, 3])),
    )
    cache = cache_config(
        draw(st.sampled_from([1, 2, 4, 4, 8])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        prefix_index=draw(st.sampled_from(["hash", "radix", "radix"])),
    )
    object.__setattr__(cache, "max_pinned_share", draw(st.sampled_from([0.0, 0.5, 0.9])))
    windows = draw(st.sampled_from(WINDOWS))
    tiers = st.none() | st.builds(
        host_tier, st.sampled_from([0, 1, 3, 9, 40]), swaps=st.booleans(), disk=st.sampled_from([0, 0, 1, 3, 40])
    )
    return Loop(
        config,
        cache,
        num_blocks=draw(st.integers(2, 9) | st.integers(9, 24)),
        max_model_len=draw(st.sampled_from([2, 20, 60])),
        depth=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(POLICIES))(config),
        windows=windows,
        tiers=draw(tiers),
        num_drafts=draw(st.sampled_from([0, 0, 1, 4, 9])),
    )


sampling = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 5, 20, 20, None]),
        "min_tokens": st.sampled_from([0, 1]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "stop_token_ids": st.sampled_from([[], [], [5], [3, 8]]),
        "eos": st.booleans(),
        "salt": st.sampled_from([None, None, None, None, "a"]),
        "priority": st.integers(0, 2),
        "tenant": st.sampled_from([Tenant(), Tenant("a"), Tenant("b", 2.0), Tenant("c", 0.5, 1), Tenant("d", 1.0, 2)]),
        "n": st.sampled_from([1, 1, 1, 2, 4]),
        "num_beams": st.sampled_from([0, 0, 0, 0, 1, 3]),
        "pins": st.lists(st.builds(CachePin, st.integers(1, 30), st.sampled_from([0.0, 1000.0])), max_size=2),
        "report": st.booleans(),
    }
)


def request_of(name: str, prompt: list[int], params: dict[str, Any]) -> EngineCoreRequest:
    params = dict(params)
    if num_beams := params.pop("num_beams"):
        early = ("never", False, True)[len(prompt) % 3]
        params["beam_search"] = BeamSearch(beam_width=num_beams + int(params["n"]), early_stopping=early)
        params["prompt_logprobs"] = None
    return make_request(name, prompt, **params)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted, fail, and the cache is reset, at any moment between two steps."""

    @initialize(loop=loops())
    def start(self, loop: Loop) -> None:
        self.loop = loop
        self.num_requests = 0
        self.sample_ids: list[str] = []

    @rule(prompt=prompts(), params=sampling)
    def add(self, prompt: list[int], params: dict[str, Any]) -> None:
        request = request_of(f"r{self.num_requests}", prompt, params)
        self.num_requests += 1
        with contextlib.suppress(ValidationError):
            self.loop.add(request)
        self.sample_ids += [one.request_id for one in request.samples()]

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        name = f"r{number}"
        self.loop.abort([i for i in self.sample_ids if i.split(".")[0] == name] + ["unknown"])

    @rule(data=st.data())
    def abort_one_sample(self, data: st.DataObject) -> None:
        if self.sample_ids:
            self.loop.abort([data.draw(st.sampled_from(self.sample_ids))])

    @rule(data=st.data())
    def break_request(self, data: st.DataObject) -> None:
        if self.sample_ids:
            name = data.draw(st.sampled_from(self.sample_ids))
            beam = data.draw(st.sampled_from(["", "/1.0", "/2.1", "/3.0"]))
            self.loop.worker.failing.add(name + beam)

    @rule(when=st.sampled_from(["before", "after"]))
    def break_step(self, when: Literal["before", "after"]) -> None:
        self.loop.raising = when

    @rule(count=st.integers(1, 3))
    def lose_loads(self, count: int) -> None:
        self.loop.worker.losing = count

    @rule(prompt=prompts(), salt=st.sampled_from([None, None, "a"]), ttl=st.sampled_from([0.0, 1000.0]))
    def pin(self, prompt: list[int], salt: str | None, ttl: float) -> None:
        self.loop.scheduler.ask(SetPin(ttl, prompt_token_ids=prompt, cache_salt=salt))

    @rule(index=st.integers(0, 5))
    def unpin(self, index: int) -> None:
        for pin in ask(self.loop, ListPrefixes(1)).pins[index : index + 1]:
            self.loop.scheduler.ask(RemovePin(pin.pin_id))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        found = ask(self.loop, ListPrefixes(100)).prefixes
        one = data.draw(st.sampled_from([None, *(prefix.prefix for prefix in found)]))
        assert ask(self.loop, EvictPrefixes(one)) != NotFound()

    @rule(prompt=prompts())
    def restore(self, prompt: list[int]) -> None:
        self.loop.scheduler.ask(SavePrefixes())
        self.loop.scheduler.ask(RestorePrefix(prompt))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.loop.scheduler.ask(ResetCache())

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run()
            self.loop.check_results()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(loop=loops(), batch=st.lists(st.tuples(prompts(), sampling), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_every_request_of_a_crowd_gives_what_it_gives_alone(loop: Loop, batch: list) -> None:
    admitted = 0
    for number, (prompt, params) in enumerate(batch):
        try:
            loop.add(request_of(f"r{number}", prompt, params))
            admitted += int(params["n"])
        except ValidationError:
            continue
    loop.run()
    loop.check_results()
    assert len(loop.received) == admitted
    for received in loop.received.values():
        assert received.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert received.outputs[0].facts is not None
        assert received.outputs[0].facts.scheduled_time is not None
        told_again = sum(output.facts is not None for output in received.outputs[1:])
        assert told_again <= received.facts.num_preemptions
