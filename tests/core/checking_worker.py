"""A worker without a model that distrusts the scheduler.

It executes plans like the real one, but a "KV cell" holds a number that stands for the whole history up to its token.
Each step first writes the cells of all its tokens, then reads back every cell each request attends to: a wrong shared
prefix, a block freed too early, a write into a shared block or a lost chunk is an AssertionError at once. The sampled
token is a function of the full history, so a request's output must be :func:`expected_output`, whatever happened to it.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

from octavo.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from octavo.core.factory import make_scheduler
from octavo.core.longest_prefix import by_prefix
from octavo.core.policy import Policy
from octavo.kv_transfer.chain import TierChain
from octavo.messages import (
    CacheOptions,
    CachePin,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTierReport,
    ModelRunnerOutput,
    NewRequestData,
    OutputOptions,
    ReportOptions,
    RequestFacts,
    RequestFault,
    SamplingParams,
    SchedulerOutput,
    SchedulingOptions,
    Tenant,
    TokenLogprobs,
)
from tests.core.beam_reference import beam_search
from tests.core.kv_parts import kv_specs

VOCAB = 23
EOS = 0
NOBODY = Tenant()
GARBAGE = -1  # what comes of KV that was never written


def cache_config(block_size: int, **options: Any) -> CacheConfig:
    """A CacheConfig with blocks smaller than kernels take, so that small tests fill them."""
    config = CacheConfig(**options)
    object.__setattr__(config, "block_size", block_size)
    return config


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    eos: bool = False,
    salt: str | None = None,
    priority: int = 0,
    tenant: Tenant = NOBODY,
    pins: Sequence[CachePin] = (),
    report: bool = False,
    **sampling: object,
) -> EngineCoreRequest:
    """A request that stops at EOS only if told to; ``report``: it asks why the cache missed."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**{"max_tokens": 8, "ignore_eos": not eos, **sampling}),
        arrival_time=0.0,
        scheduling=SchedulingOptions(priority=priority, tenant=tenant),
        cache=CacheOptions(salt=salt, pins=tuple(pins)),
        report=ReportOptions(cache_miss=report),
        output=OutputOptions(eos_token_ids=[EOS]),
    )


def extend_history(history: int, token_id: int) -> int:
    """The number that stands for ``history`` followed by ``token_id``."""
    return hash((history, token_id))


def empty_history(salt: str | None) -> int:
    return zlib.crc32(repr(salt).encode())


def sample(history: int, sample_index: int = 0) -> int:
    """The token that follows ``history`` in a sample."""
    return (history // 7 + 5 * sample_index) % VOCAB


def prompt_logprob(history: int, token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-float(history % 1000)], [1])


def expected_output(request: EngineCoreRequest, limit: int) -> tuple[list[int], FinishReason]:
    """What the request must give, computed alone; ``limit``: most tokens of the whole sequence."""
    params, history = request.sampling_params, empty_history(request.cache.salt)
    for token_id in request.prompt_token_ids:
        history = extend_history(history, token_id)
    output: list[int] = []
    while True:
        output.append(sample(history, request.sample_index))
        history = extend_history(history, output[-1])
        stops = [*params.stop_token_ids, *([] if params.ignore_eos else request.output.eos_token_ids)]
        if len(output) >= params.min_tokens and output[-1] in stops:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(request.prompt_token_ids) + len(output) == limit:
            return output, FinishReason.LENGTH


def token_logprobs(history: int) -> list[float]:
    """By token id, for beams. Coarse, so that there are ties."""
    return [-(hash((history, token_id)) // 11 % 40) / 4 for token_id in range(VOCAB)]


def ranked_logprobs(history: int, count: int) -> TokenLogprobs:
    """The ``count`` best of :func:`token_logprobs`, behind the first one as the token that was sampled."""
    row = token_logprobs(history)
    ids = sorted(range(VOCAB), key=lambda token_id: (-row[token_id], token_id))[:count]
    ids.insert(0, ids[0])
    return TokenLogprobs(ids, [row[token_id] for token_id in ids], [1, *range(1, len(ids))])


def expected_beams(request: EngineCoreRequest, limit: int) -> list[tuple[list[int], FinishReason]]:
    """What a beam search must give, best first."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    assert params.beam_search is not None
    ends = {*params.stop_token_ids, *([] if params.ignore_eos else request.output.eos_token_ids)}
    start = empty_history(request.cache.salt)
    for token_id in prompt:
        start = extend_history(start, token_id)

    def row(output: tuple[int, ...]) -> list[float]:
        history = start
        for token_id in output:
            history = extend_history(history, token_id)
        return token_logprobs(history)

    found = beam_search(
        row,
        width=params.beam_search.beam_width,
        ends=ends,
        max_tokens=min(params.max_tokens or limit, limit - len(prompt)),
        length_penalty=params.beam_search.length_penalty,
        early_stopping=params.beam_search.early_stopping,
        min_tokens=params.min_tokens,
    )
    return [(list(output), FinishReason.STOP if output[-1] in ends else FinishReason.LENGTH) for _, output in found]


def expected_prompt_logprobs(request: EngineCoreRequest) -> list[TokenLogprobs]:
    history, result = empty_history(request.cache.salt), []
    prompt = request.prompt_token_ids
    for position, token_id in enumerate(prompt):
        if position > 0:
            result.append(prompt_logprob(history, token_id))
        history = extend_history(history, token_id)
    return result


class _State:
    def __init__(self, new: NewRequestData, salt: str | None) -> None:
        self.tokens = list(new.token_ids)
        self.table = list(new.block_ids)
        self.num_computed = new.num_computed_tokens
        self.num_known = len(self.tokens)  # without drafts
        self.num_prompt_tokens = new.num_prompt_tokens
        self.sample_index = new.sample_index
        self.siblings = new.siblings
        self.num_logprobs = new.sampling_params.logprobs
        self.wants_prompt_logprobs = new.sampling_params.prompt_logprobs is not None
        self.histories = [empty_history(salt)]  # histories[p]: before position p

    def history(self, position: int) -> int:
        while len(self.histories) <= position:
            token_id = self.tokens[len(self.histories) - 1]
            self.histories.append(extend_history(self.histories[-1], token_id))
        return self.histories[position]

    def try_drafts(self, token_ids: list[int]) -> None:
        self.tokens += token_ids

    def learn(self, token_ids: list[int]) -> None:
        """``token_ids`` follow the known tokens, whatever was tried there."""
        self.tokens[self.num_known :] = token_ids
        del self.histories[self.num_known + 1 :]
        self.num_known = len(self.tokens)


class _Copy(NamedTuple):
    """A block in a tier."""

    key: bytes
    cells: list[int | None]
    owed: list[bool]


class CheckingWorker:
    """``salts`` tells the cache salts of requests, which plans do not carry.

    ``failing`` ids are left out of every step and give an error, like requests the real worker cannot take in: the
    cells they should have written are ``owed``, and whoever reads those gets ``GARBAGE``, which must reach nobody.
    Requests that want prompt logprobs are computed in a pass of their own, after all others. For each request that is
    sampled up to ``num_drafts`` tokens are guessed, right ones and wrong ones.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_size: int,
        num_blocks: int,
        windows: Sequence[int | None] = (None,),
        num_drafts: int = 0,
    ) -> None:
        self.config, self.block_size, self.windows, self.num_drafts = config, block_size, windows, num_drafts
        self.cells: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.owed: set[tuple[int, int]] = set()
        self.states: dict[str, _State] = {}
        self.salts: dict[str, str | None] = {}
        self.failing: set[str] = set()
        self.tiers: dict[str, dict[int | bytes, _Copy]] = {}
        self.losing = 0  # loads to come that fail
        self.num_loads = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one plan; AssertionError if it is not sound."""
        reports = self._move(plan)
        self._take_in(plan)
        self._copy_blocks(plan)
        self._check_writes(plan)
        passes: tuple[list[str], list[str]] = ([], [])
        for request_id in plan.num_scheduled_tokens:
            passes[self.states[request_id].wants_prompt_logprobs].append(request_id)
        output = ModelRunnerOutput(step_id=plan.step_id, kv_tiers=reports)
        for request_ids in passes:
            for request_id in request_ids:
                self._write(request_id, plan.num_scheduled_tokens[request_id])
            for request_id in request_ids:
                if request_id in self.failing:
                    output.errors[request_id] = RequestFault("broken")
                self._compute(request_id, plan.num_scheduled_tokens[request_id], output)
        return output

    def _compute(self, request_id: str, count: int, output: ModelRunnerOutput) -> None:
        state = self.states[request_id]
        start = state.num_computed
        end = state.num_computed = start + count
        if request_id in self.failing:
            if end == len(state.tokens):
                state.learn([GARBAGE])
            return
        sound = True
        for group, window in enumerate(self.windows):
            for position in range(0 if window is None else max(0, start - window + 1), end):
                cell = self._cell(state, position, group)
                if self.cells[cell[0]][cell[1]] != state.history(position + 1) + group:
                    assert cell in self.owed, f"{request_id} reads foreign KV at position {position} of group {group}"
                    sound = False
        if not sound:
            groups = range(len(self.windows))
            self.owed.update(self._cell(state, position, group) for position in range(start, end) for group in groups)
        if state.wants_prompt_logprobs and start + 1 < state.num_prompt_tokens:
            output.prompt_logprobs[request_id] = [
                prompt_logprob(state.history(p) if sound else GARBAGE, state.tokens[p])
                for p in range(start + 1, min(end + 1, state.num_prompt_tokens))
            ]
        if end == len(state.tokens):
            for name, index in state.siblings.items():
                output.sampled_token_ids[name] = [sample(state.history(end), index) if sound else GARBAGE]
            state.siblings = {}
            if state.num_logprobs is not None:
                output.logprobs[request_id] = [ranked_logprobs(state.history(end) if sound else 0, state.num_logprobs)]
            output.sampled_token_ids[request_id] = sampled = self._sample(state) if sound else [GARBAGE]
            state.learn(sampled)
            state.num_computed = state.num_known - 1
            if draft := self._draft(state):
                output.draft_token_ids[request_id] = draft

    def _sample(self, state: _State) -> list[int]:
        """The next token, and behind each draft that is the token before it, one more."""
        position, sampled = state.num_known, []
        while True:
            sampled.append(sample(state.history(position), state.sample_index))
            if state.tokens[position : position + 1] != sampled[-1:]:
                return sampled
            position += 1

    def _draft(self, state: _State) -> list[int]:
        """Of different lengths; most of their tokens are right."""
        draft, history = [], state.history(state.num_known)
        for _ in range(history % (self.num_drafts + 1)):
            token_id = sample(history, state.sample_index)
            draft.append(token_id if history % 5 else (token_id + 1) % VOCAB)
            history = extend_history(history, draft[-1])
        return draft

    def _cell(self, state: _State, position: int, group: int) -> tuple[int, int]:
        row, offset = divmod(position, self.block_size)
        return state.table[row * len(self.windows) + group], offset

    def _write(self, request_id: str, count: int) -> None:
        state = self.states[request_id]
        for position in range(state.num_computed, state.num_computed + count):
            for group in range(len(self.windows)):
                block_id, offset = self._cell(state, position, group)
                if request_id in self.failing:
                    self.cells[block_id][offset] = None
                    self.owed.add((block_id, offset))
                else:
                    self.cells[block_id][offset] = state.history(position + 1) + group
                    self.owed.discard((block_id, offset))

    def _forget_unseen(self, state: _State) -> None:
        """Blocks of which the next token sees nothing may be anybody's from now on."""
        for group, window in enumerate(self.windows):
            if window is not None:
                for row in range(max(0, state.num_computed - window + 1) // self.block_size):
                    state.table[row * len(self.windows) + group] = 0

    def _take_in(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_request_ids:
            self.states.pop(request_id, None)  # unknown if planning its first step failed
        for new in plan.new_requests:
            assert new.request_id not in self.states
            name = new.request_id.split("/")[0]  # a beam has the salt of its search
            self.states[new.request_id] = _State(new, self.salts.get(name))
        for cached in plan.cached_requests:
            state = self.states[cached.request_id]
            assert cached.num_computed_tokens == state.num_computed
            assert 0 <= cached.num_replaced <= len(cached.new_block_ids)
            state.table[len(state.table) - cached.num_replaced :] = cached.new_block_ids
            state.try_drafts(plan.draft_token_ids.get(cached.request_id, []))
        for listed_one in [*plan.new_requests, *plan.cached_requests]:
            self._forget_unseen(self.states[listed_one.request_id])
        assert plan.draft_token_ids.keys() <= {cached.request_id for cached in plan.cached_requests}
        listed = [r.request_id for r in [*plan.new_requests, *plan.cached_requests]]
        assert sorted(listed) == sorted(plan.num_scheduled_tokens)
        assert all(count > 0 for count in plan.num_scheduled_tokens.values())
        assert plan.total_num_scheduled_tokens <= self.config.step_tokens
        assert len(self.states) <= self.config.max_num_seqs

    def _move(self, plan: SchedulerOutput) -> dict[str, KVTierReport]:
        failed: dict[str, list[tuple[bytes, int]]] = {move.tier: [] for move in plan.kv_moves}
        kept: dict[str, list[bytes]] = {move.tier: [] for move in plan.kv_moves}
        for move in plan.kv_moves:
            places, place = self.tiers.setdefault(move.tier, {}), move.slot if move.tier == "host" else move.key
            cells = [(move.block_id, offset) for offset in range(self.block_size)]
            if move.kind == "drop":
                places.pop(place, None)
            elif move.kind == "store":
                owed = [cell in self.owed for cell in cells]
                places[place] = _Copy(move.key, list(self.cells[move.block_id]), owed)
                kept[move.tier].append(move.key)
            elif self.losing > 0:
                self.losing -= 1
                failed[move.tier].append((move.key, move.block_id))
                self.cells[move.block_id] = [None] * self.block_size
                self.owed.update(cells)
            else:
                key, histories, owed = places[place]
                assert key == move.key, "a place was given to another key"
                self.cells[move.block_id] = list(histories)
                self.owed.difference_update(cells)
                self.owed.update(cell for cell, is_owed in zip(cells, owed, strict=True) if is_owed)
                self.num_loads += 1
        return {tier: KVTierReport(failed=failed[tier], kept=kept[tier]) for tier in failed}

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        for source, destination in plan.block_copies:
            assert source != destination
            for offset in range(self.block_size):
                self.cells[destination][offset] = self.cells[source][offset]
                self.owed.discard((destination, offset))
                if (source, offset) in self.owed:
                    self.owed.add((destination, offset))

    def _check_writes(self, plan: SchedulerOutput) -> None:
        new = {request.request_id for request in plan.new_requests}  # these may read what this very step writes
        old = {request_id: state for request_id, state in self.states.items() if request_id not in new}
        owners = Counter(block_id for state in old.values() for block_id in state.table if block_id)
        written: dict[int, str] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            state = self.states[request_id]
            held = [block_id for block_id in state.table if block_id]
            assert len(set(held)) == len(held)
            assert state.num_computed + count <= len(state.tokens), f"{request_id}: tokens nobody knows"
            positions = range(state.num_computed, state.num_computed + count)
            for position, group in product(positions, range(len(self.windows))):
                block_id, _ = self._cell(state, position, group)
                assert 0 < block_id < len(self.cells)
                assert owners[block_id] == (request_id in old), f"{request_id} writes into shared block {block_id}"
                assert written.setdefault(block_id, request_id) == request_id, f"two write into block {block_id}"


@dataclass
class Received:
    """All that the front end got of one request."""

    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def facts(self) -> RequestFacts:
        """Those told last."""
        return next((output.facts for output in reversed(self.outputs) if output.facts is not None), RequestFacts())


class Loop:
    """Scheduler and CheckingWorker with up to ``depth`` steps in flight, and all that is true of every step."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int = 1000,
        depth: int = 1,
        policy: Policy | None = None,
        windows: Sequence[int | None] = (None,),
        tiers: TierChain | None = None,
        num_drafts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_drafts:
            speculative = SpeculativeConfig(
                method="ngram", num_speculative_tokens=num_drafts, disable_by_batch_size=config.max_num_seqs
            )
            config = dataclasses.replace(config, speculative_config=speculative)
        else:
            config = dataclasses.replace(config, pipeline_depth=depth)
        self.scheduler = make_scheduler(
            config, cache, num_blocks, max_model_len, groups=kv_specs(windows), tiers=tiers, clock=clock
        )
        if policy is not None:
            kv, overtakes = self.scheduler._kv, config.longest_prefix_first
            policy = by_prefix(policy, overtakes, lambda request: kv.find_prefix(request).num_tokens)
            self.scheduler._policy = self.scheduler._book._policy = policy
        self.worker = CheckingWorker(config, cache.block_size, num_blocks, windows, num_drafts)
        self.limit = min(max_model_len, self.scheduler._limits._max_kv_tokens + 1)
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()  # None: it raised, or is void
        self.blamed: set[str] = set()  # ended by a step that raised
        self.raising: Literal["before", "after"] | None = None  # what the next step does, its work done or not
        self.requests: dict[str, EngineCoreRequest] = {}
        self.received: dict[str, Received] = {}
        self.num_plans = 0
        self.num_tried = self.num_right = 0  # draft tokens
        self._beams: dict[str, list[tuple[list[int], FinishReason]]] = {}

    def add(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)
        for one in request.samples():
            self.worker.salts[one.request_id] = one.cache.salt
            self.requests[one.request_id] = one
            self.received[one.request_id] = Received()

    def abort(self, request_ids: list[str]) -> None:
        self._receive(self.scheduler.abort(request_ids))

    def step(self) -> SchedulerOutput | None:
        """Plan until ``depth`` steps are in flight, then take in the oldest result; the last plan, if there was one."""
        plan = None
        while len(self.in_flight) < self.depth:
            runnable = {r.request_id for r in self.scheduler._running if r.num_wanted > 0}
            plan = self.scheduler.schedule()
            self.scheduler.check_invariants()
            self._receive(self.scheduler.take_failed())
            self._check_references(plan)
            skipped = runnable - plan.num_scheduled_tokens.keys() - set(plan.finished_request_ids)
            assert not skipped, f"{skipped} could run but got nothing"
            if plan.is_empty:
                assert self.in_flight or not self.scheduler.has_requests(), "nothing to do, yet requests wait"
                break
            self.num_plans += 1
            self.in_flight.append((plan, self._execute(plan)))
        if self.in_flight and self.in_flight[0][1] is None:
            self._fail()
        elif self.in_flight:
            outputs = self.scheduler.update(*self.in_flight.popleft())
            self.scheduler.check_invariants()
            assert outputs.stats is not None
            assert 0.0 <= outputs.stats.kv_cache_usage <= 1.0
            self.num_tried += outputs.stats.num_draft_tokens_delta
            self.num_right += sum(outputs.stats.accepted_per_position_delta)
            self._receive(outputs.outputs)
        return plan

    def _check_references(self, plan: SchedulerOutput) -> None:
        """Nobody writes into a partly filled block that others hold, be they running or not."""
        blocks, size = self.scheduler._kv.pool.blocks, self.worker.block_size
        for request_id in plan.num_scheduled_tokens:
            request = self.scheduler._book.requests[request_id]
            if request.num_computed_tokens % size:
                block = blocks[self.scheduler._kv.block_ids(request)[-1]]
                assert block.ref_count == 1, f"{request_id} writes into {block}"

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        raising, self.raising = self.raising, None
        if raising == "before" or any(result is None for _, result in self.in_flight):
            return None
        result = self.worker.execute(plan)
        return None if raising else result

    def _fail(self) -> None:
        """The oldest step has raised: it and all others in flight are void."""
        plans = [plan for plan, _ in self.in_flight]
        self.in_flight.clear()
        names = sorted({name for plan in plans for name in plan.num_scheduled_tokens})
        finished = [name for plan in plans for name in plan.finished_request_ids]
        outputs = self.scheduler.step_failed(names, finished, RequestFault("the step raised"))
        self.blamed.update(output.request_id for output in outputs)
        self._receive(outputs)
        self.scheduler.check_invariants()

    def run(self) -> None:
        """Until nothing is left; more steps than an uncontended run of each request after the other is a livelock.

        (A beam may have to be computed again for each of its tokens, if the pool cannot hold them all.)
        """
        beams = [one.sampling_params.beam_search for one in self.requests.values()]
        longest = min(self.limit, 1000) + 4
        bound = self.num_plans + sum(longest if one is None else one.beam_width * longest**2 for one in beams) + 8
        while self.scheduler.has_requests() or self.in_flight:
            self.step()
            assert self.num_plans < bound, "livelock"
        assert not self.worker.states
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        pool, pins = self.scheduler._kv.pool, self.scheduler._kv.cache.pins
        assert pool.num_free == pool.num_usable - len(pins.held)

    def check_results(self) -> None:
        """Each finished request gave what it gives alone (or, if it was ended from outside, the beginning of that)."""
        for request_id, received in self.received.items():
            request = self.requests[request_id]
            if request.sampling_params.beam_search is not None:
                tokens, reason = self._expected_beam(request)
            else:
                tokens, reason = expected_output(request, self.limit)
            if received.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (received.tokens, received.finish_reason) == (tokens, reason)
                if request.sampling_params.prompt_logprobs is not None:
                    assert received.prompt_logprobs == expected_prompt_logprobs(request)
            else:
                assert received.tokens == tokens[: len(received.tokens)]

    def _expected_beam(self, request: EngineCoreRequest) -> tuple[list[int], FinishReason]:
        name = request.request_id.split(".")[0]
        if name not in self._beams:
            self._beams[name] = expected_beams(request, self.limit)
        return self._beams[name][request.sample_index]

    def _receive(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            received = self.received[output.request_id]
            assert received.finish_reason is None, f"{output.request_id} speaks after its end"
            if (facts := output.facts) is not None:
                assert facts != received.facts, f"{output.request_id} tells the same twice"
                assert facts.num_cached_tokens < len(self.requests[output.request_id].prompt_token_ids)
            received.outputs.append(output)
            received.tokens += output.new_token_ids
            received.prompt_logprobs += output.new_prompt_logprobs or []
            received.finish_reason = output.finish_reason
