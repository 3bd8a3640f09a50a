"""Scheduler: how many tokens of each request the next step computes, and what a step's result means.

Knows no tensors, no text, no process: it hands out ``SchedulerOutput`` and takes back ``ModelRunnerOutput``. Several
plans may be under way: ``schedule()`` may be called again before ``update()`` of the former, as long as plans are
executed, and their results handed back, in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from octavo.config import SchedulerConfig
from octavo.core.admission import AdmissionRule, Deferral, LengthLimits, Requirement
from octavo.core.kv_cache.manager import KVCacheManager, Room
from octavo.core.observers import Observer
from octavo.core.policy import Policy
from octavo.core.queries import CoreState, reply_to
from octavo.core.request import Request, RequestStatus
from octavo.core.request_book import RequestBook
from octavo.core.sample_group import SOLO, first_request
from octavo.core.step import Scheduled, StepBuilder
from octavo.core.suspects import Suspects
from octavo.exceptions import InvariantError
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    KVEvent,
    ModelRunnerOutput,
    Query,
    Reply,
    RequestFault,
    SchedulerOutput,
    SchedulerStats,
)


class Scheduler:
    """Continuous batching over one block pool.

    There are no phases. Each request has ``num_computed_tokens`` and a number of tokens it could compute; a step gives
    it some of them. The first of the policy's order progresses in every step, so the engine never stands still.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        policy: Policy,
        limits: LengthLimits,
        suspects: Suspects,
        *,
        rules: Sequence[AdmissionRule],
        requirements: Sequence[Requirement],
        observers: Sequence[Observer],
        clock: Callable[[], float],
    ) -> None:
        """:func:`octavo.core.factory.make_scheduler` makes the parts. ``clock`` gives seconds."""
        self._config, self._clock = config, clock
        self._kv, self._policy, self._limits = kv, policy, limits
        self._suspects, self._rules, self._observers = suspects, rules, observers
        self._deferral = Deferral(requirements)
        chunked = config.enable_chunked_prefill and config.long_prefill_token_threshold > 0
        self._longest_chunk = config.long_prefill_token_threshold if chunked else config.step_tokens
        self._book = RequestBook(policy, kv, observers)
        self._running = self._book.running
        self._state = CoreState(kv, self._book.requests, self._running, clock)
        self._failed: list[EngineCoreOutput] = []
        self._in_flight: dict[int, tuple[float, list[Scheduled]]] = {}  # by step id: time of planning, contents
        self._next_step_id = 0
        self._last_update = 0.0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValidationError if it can never be served or its id is in use."""
        self._limits.check(request)
        limit = self._limits.end(request)
        self._book.add(first_request(request, limit=limit, queued_time=self._clock()))

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Every plan that is not empty must be executed, then given to ``update``.

        A request whose planning raises ends alone: see ``take_failed``. Raises InvariantError.

        Running requests come first, in the policy's order; each gets what it wants, but one token of the budget is kept
        for each request behind it, so none that can run is skipped. When blocks run out, the policy's victim gives way,
        perhaps one that was planned a moment ago. If none had to, waiting requests may start. Those that the policy
        puts before the running ones start first of all. Drafts get what is left.
        """
        step = StepBuilder(self._next_step_id, self._config.step_tokens)
        self._next_step_id += 1
        self._kv.cache.pins.expire()

        self._start(step, urgently=True)
        order = [request for request in self._policy.order(self._running) if request not in step]
        for index, request in enumerate(order):
            if request.status is not RequestStatus.RUNNING:
                continue  # gave way to a request before it
            try:
                self._plan(request, len(order) - 1 - index, step)
            except Exception as error:
                self._drop(request, error, step)

        for entry in list(step.scheduled):  # none gives way to another from here on
            try:
                self._commit(entry)
            except Exception as error:
                self._drop(entry.request, error, step)

        if step.num_preempted == 0:
            self._start(step)
        if len(step) <= self._config.most_speculating:
            self._plan_drafts(step)

        plan = step.build(self._book.take_finished_ids(), self._kv.take_moves(step.step_id))
        if plan.num_scheduled_tokens:
            self._in_flight[plan.step_id] = (self._clock(), list(step.scheduled))
        return plan

    def _start(self, step: StepBuilder, *, urgently: bool = False) -> None:
        """Let waiting requests start, in order, until one must wait longer.

        ``urgently``: before the running ones have got their parts of the step, of which one token is kept for each. So
        may those that the policy says, at the cost of those it names. What is planned here may still be undone, so it
        is not shared yet.
        """
        while True:
            self._deferral.begin(self._running)
            waiting = self._policy.peek(self._deferral.is_ready)
            if waiting is None or (urgently and not self._policy.goes_first(waiting, self._running)):
                break
            if waiting.facts.scheduled_time is None and waiting.is_late(self._clock()):
                self._failed += self._book.end(waiting.request_id, FinishReason.ABORT)
                continue
            try:
                kept = len(self._running) - len(step) if urgently else 0
                if self._admit(waiting, step, kept):
                    if not urgently:
                        self._commit(step.last)
                elif not (urgently and self._displace(waiting, step)):
                    break
            except Exception as error:
                self._drop(waiting, error, step)

    def _commit(self, entry: Scheduled) -> None:
        """``entry`` will be computed: others may share it, and it is counted as service."""
        self._kv.share(entry.request)
        self._policy.served(entry.request, entry.num_tokens + entry.samples)

    def _displace(self, waiting: Request, step: StepBuilder) -> bool:
        """Preempt one request whose place or blocks ``waiting`` may take. False if it lacks something else.

        It may have started in this very step: while it did, ``waiting`` lacked a grammar, or a seat of its tenant's.
        """
        lesser = self._policy.displaced(waiting, self._running)
        if not lesser or not self._would_help(waiting, lesser):
            return False
        victim = self._policy.victim(lesser)
        self._kv.swap_out(victim, step.remove(victim).copies)
        self._book.preempt(victim)
        return True

    def _would_help(self, waiting: Request, lesser: Sequence[Request]) -> bool:
        """Does ``waiting`` lack places or blocks that it would find if ``lesser`` of the running ones were gone?"""
        others = [request for request in self._running if request not in lesser]
        reserved = self._kv.num_missing(others)

        def fits(left: Sequence[Request], gone: Sequence[Request]) -> bool:
            admitted = all(rule.admits(waiting, left) for rule in self._rules)
            return admitted and self._kv.would_fit(waiting, gone, reserved=reserved)

        return not fits(self._running, ()) and fits(others, lesser)

    def _plan(self, request: Request, num_behind: int, step: StepBuilder) -> None:
        """Give a running request its part of the step; ``num_behind`` others still want a token of it."""
        num_tokens = self._chunk(request.num_wanted, step.tokens_left - num_behind)
        if num_tokens > 0:
            room = self._make_room(request, num_tokens, step)
            if room is not None:
                step.add(request, num_tokens, room)

    def _drop(self, request: Request, error: Exception, step: StepBuilder) -> None:
        """Planning ``request`` raised: it leaves the plan and ends alone; its output waits for ``take_failed``.

        An InvariantError is raised again: the books are wrong, so no request's blocks can be trusted.
        """
        if isinstance(error, InvariantError):
            raise error
        step.remove(request)
        self._failed += self._book.fail(request.request_id, RequestFault.of(error, "scheduling"))

    def take_failed(self) -> list[EngineCoreOutput]:
        """The last outputs of requests that ended while a step was planned."""
        failed, self._failed = self._failed, []
        return failed

    def _chunk(self, num_wanted: int, room: int) -> int:
        """How many of ``num_wanted`` tokens one request gets when ``room`` are left: chunked prefill is this line."""
        return min(num_wanted, self._longest_chunk, room)

    def _make_room(self, request: Request, num_tokens: int, step: StepBuilder) -> Room | None:
        """New blocks for ``num_tokens`` of a running request; None if it was itself the one to give way."""
        while True:
            room = self._kv.extend(request, num_tokens)
            if room is not None:
                return room
            if self._kv.reclaim(request, self._book.requests.values()):
                continue
            victim = self._policy.victim(self._running)
            self._kv.swap_out(victim, step.undo(victim).copies)
            self._book.preempt(victim)
            if victim is request:
                return None

    def _admit(self, request: Request, step: StepBuilder, kept: int = 0) -> bool:
        """Start a waiting request behind its longest cached prefix, with at most all but ``kept`` of the step's tokens.

        False, and nothing changed, if it must wait.
        """
        tokens_left = step.tokens_left - kept
        if tokens_left <= 0 or not all(rule.admits(request, self._running) for rule in self._rules):
            return False
        prefix = self._kv.find_prefix(request)
        num_wanted = request.num_tokens - prefix.num_tokens
        if self._must_stay_whole(num_wanted) and num_wanted > tokens_left:
            return False
        num_tokens = self._chunk(num_wanted, tokens_left)
        lesser = self._policy.displaced(request, self._running)
        reserved = self._kv.num_missing([one for one in self._running if one not in lesser])
        room = self._kv.admit(request, prefix, num_tokens, reserved=reserved)
        if room is None:  # while others run, blocks will become free
            return (
                not self._running
                and self._kv.reclaim(request, self._book.requests.values())
                and self._admit(request, step, kept)
            )
        self._book.start(request, prefix, self._clock())
        step.add(request, num_tokens, room, is_new=True)
        return True

    def _must_stay_whole(self, num_wanted: int) -> bool:
        """Without chunked prefill a prompt is computed in one step, unless its own output has made it too long."""
        return not self._config.enable_chunked_prefill and num_wanted <= self._config.step_tokens

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        """Take in the result of a plan. What it says of requests finished or preempted since is dropped.

        A request whose part of it raises ends alone. Raises InvariantError, e.g. if ``result`` is of another plan.
        """
        if result.step_id != plan.step_id:
            raise InvariantError(f"result of step {result.step_id} for the plan of step {plan.step_id}")
        now = self._clock()
        planned_at, scheduled = self._in_flight.pop(plan.step_id, (now, []))
        seconds, self._last_update = now - max(planned_at, self._last_update), now
        self._restart(self._kv.spoil(self._kv.tiers.settle(plan, result, seconds)))
        ends = [(entry, entry.error(result)) for entry in scheduled if entry.is_valid]
        for entry, error in ends:  # one that failed may not have filled its blocks; its sharers compute their own
            if error is not None and entry.is_valid:
                self._restart(self._kv.sharers(entry.request, entry.start))
        outputs: list[EngineCoreOutput] = []
        for entry, error in ends:
            if not entry.is_valid:
                continue
            try:
                outputs += self._apply(entry, error, result)
            except InvariantError:
                raise
            except Exception as raised:
                outputs += self._book.fail(entry.request.request_id, RequestFault.of(raised, "taking in its token"))
        self._offer_drafts(result)
        stats = self.stats(plan.total_num_scheduled_tokens, seconds)
        return EngineCoreOutputs(outputs=outputs, timestamp=now, stats=stats)

    def _restart(self, request_ids: Collection[str]) -> None:
        """These requests may have read blocks that no step filled; those of them that run start anew."""
        for request in [r for r in reversed(self._running) if r.request_id in request_ids]:
            self._book.preempt(request)

    def _apply(
        self, entry: Scheduled, error: RequestFault | None, result: ModelRunnerOutput
    ) -> Sequence[EngineCoreOutput]:
        """One request's part of a result, in which it failed if ``error`` says so."""
        request = entry.request
        if error is not None:
            return self._book.fail(request.request_id, error)
        request.confirm(entry.end)

        prompt_logprobs = request.new_prompt_logprobs(result, entry.start)
        if not entry.samples:
            return (request.output([], prompt_logprobs=prompt_logprobs),) if prompt_logprobs else ()

        request.num_placeholders -= 1
        self._suspects.clear(request)
        if entry.draft_token_ids:
            self._judge_drafts(entry, result)
        if request.sample_group is not SOLO:
            return self._book.grow(request, request.sample_group.advance(request, result, prompt_logprobs))
        output = request.append_sampled(result, prompt_logprobs)
        if output.finish_reason is not None:
            self._book.finish(request)
        return (output,)

    # ---- drafts

    def _plan_drafts(self, step: StepBuilder) -> None:
        """Let the requests that are sampled try their drafts, in order, in the tokens and blocks that the step leaves.

        No draft goes beyond the last possible token of its request, and no request gives way to a draft.
        """
        for entry in step.scheduled:
            request = entry.request
            if not entry.samples or entry.end != request.num_tokens:
                continue  # its last known token is not computed, or is not its last one: steps in flight sample others
            most = min(step.tokens_left, request.limit - request.num_tokens - 1)
            drafts = request.drafts.after(request.num_tokens, most)
            if drafts and (room := self._kv.extend(request, len(drafts))) is not None:
                step.speculate(entry, drafts, room)
                self._policy.served(request, len(drafts))

    def _judge_drafts(self, entry: Scheduled, result: ModelRunnerOutput) -> None:
        """Take back what ``entry``, which tried drafts, computed of wrong ones. Before its tokens are appended."""
        request, num_tried = entry.request, len(entry.draft_token_ids)
        num_right = len(result.sampled_token_ids[request.request_id]) - 1
        request.retract(num_tried - num_right)
        request.drafts.judge(request.num_tokens, num_tried, num_right)
        self._policy.served(request, num_right)
        for observer in self._observers:
            observer.drafted(request, num_tried, num_right)

    def _offer_drafts(self, result: ModelRunnerOutput) -> None:
        """Keep what ``result`` guesses of running requests for the next plan. After its tokens are appended."""
        for request_id, token_ids in result.draft_token_ids.items():
            request = self._book.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                request.drafts.offer(token_ids, request.num_tokens)

    # ---- ends

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests on behalf of the front end, at once; ids that are not here (any more) are ignored."""
        return [output for request_id in request_ids for output in self._book.end(request_id, FinishReason.ABORT)]

    def step_failed(
        self, request_ids: Sequence[str], finished_ids: Sequence[str], fault: RequestFault
    ) -> list[EngineCoreOutput]:
        """A plan that had these requests raised: end the one to blame, if that is known, and start the others anew.

        Blocks that it should have filled hold anything: name also the requests of all plans in flight after it. Neither
        kind of plan is then given to ``update``. Ids that are not here are ignored. ``finished_ids`` of those plans are
        told again, for the worker may not have heard of them.
        """
        self._book.finished_ids += finished_ids
        self._kv.tiers.void()
        named = [self._book.requests[request_id] for request_id in request_ids if request_id in self._book.requests]
        outputs = [
            output for one in self._suspects.to_blame(named) for output in self._book.fail(one.request_id, fault)
        ]
        left = [request for request in named if request.request_id in self._book.requests]
        self._suspects.add(left)
        for request in reversed([one for one in self._running if one in left]):
            self._book.preempt(request)
        for step_id, (_, scheduled) in list(self._in_flight.items()):
            if not any(entry.is_valid for entry in scheduled):
                del self._in_flight[step_id]
        return outputs

    def has_requests(self) -> bool:
        """Is there anything to schedule, wait for, or tell the worker to forget or to move?"""
        return bool(self._book.requests or self._book.finished_ids or self._kv.tiers.chain.has_moves)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._policy)

    def stats(self, iteration_tokens: int = 0, step_seconds: float = 0.0) -> SchedulerStats:
        """The state now, after a step of so many tokens; counters start again at zero."""
        observed: dict[str, Any] = {}
        for observer in self._observers:
            observed |= observer.take_stats()
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._policy),
            kv_cache_usage=self._kv.pool.usage,
            kv_cache_pinned=self._kv.cache.pins.usage,
            num_blocks=len(self._kv.pool.blocks),
            iteration_tokens=iteration_tokens,
            step_seconds=step_seconds,
            num_deferred=self._deferral.num_passed,
            kv_tiers=self._kv.tiers.stats(),
            **observed,
        )

    def ask(self, query: Query[Any]) -> Reply:
        """Handle ``query`` between two steps, see ``octavo.core.queries``; running requests go on."""
        return reply_to(query, self._state)

    @property
    def seconds_to_expiry(self) -> float | None:
        """See ``PinTable``."""
        return self._kv.cache.pins.seconds_to_expiry

    def expire_pins(self) -> None:
        """Let go of the pins whose time is over, as each ``schedule`` does."""
        self._kv.cache.pins.expire()

    def take_kv_events(self) -> Sequence[KVEvent]:
        """What became of cached blocks since the last call, where KV events are enabled."""
        return self._kv.cache.events.take()

    def check_invariants(self) -> None:
        """Raises InvariantError, naming the contradiction. Walks all blocks: milliseconds, so meant for idle times."""
        self._kv.check_invariants([request for request in self._book.requests.values() if request.holds_blocks])
        in_flight = (entry for _, step in self._in_flight.values() for entry in step)
        self._book.check(in_flight, self._config.max_num_seqs)
