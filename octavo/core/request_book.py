"""RequestBook: every request that is not finished, and in which list it is. It moves them, and decides nothing.

At each move the book tells the queue, the block tables, the worker (in the next plan) and the observers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.prefix_finder import Prefix
from octavo.core.observers import Observer
from octavo.core.policy import Policy
from octavo.core.request import Request, RequestStatus
from octavo.core.sample_group import Growth, SampleGroup
from octavo.core.step import Scheduled
from octavo.exceptions import InvariantError, ValidationError
from octavo.messages import EngineCoreOutput, FinishReason, RequestFault


class RequestBook:
    """Those that wait are in ``policy``'s queue, too."""

    def __init__(self, policy: Policy, kv: KVCacheManager, observers: Sequence[Observer]) -> None:
        self._policy = policy
        self._kv = kv
        self._observers = observers
        self.requests: dict[str, Request] = {}
        self.owing: dict[str, SampleGroup] = {}  # by the id of an output for which there is no request (yet)
        self.running: list[Request] = []  # in order of admission
        self.finished_ids: list[str] = []  # known to the worker, to be forgotten with the next plan

    def add(self, request: Request) -> None:
        """``request`` waits. Raises ValidationError if its id is in use."""
        group = request.sample_group
        if any(name in self.requests or name in self.owing for name in (request.request_id, *group.owed)):
            raise ValidationError(f"request id {request.source.request_id!r} is in use", parameter="request_id")
        self._policy.enqueue(request)
        self.requests[request.request_id] = request
        self.owing.update(dict.fromkeys(group.owed, group))
        for observer in self._observers:
            observer.queued(request)

    def start(self, request: Request, prefix: Prefix, now: float) -> None:
        """``request`` runs; ``prefix`` is in its block table."""
        is_first = request.facts.scheduled_time is None
        self._policy.remove(request)
        self.running.append(request)
        request.start(prefix.num_tokens, now, num_external=prefix.num_external)
        if is_first:
            reads_cache = self._kv.enable_prefix_caching and request.num_reusable_tokens > 0
            for observer in self._observers:
                observer.admitted(request, prefix if reads_cache else None)

    def take_finished_ids(self) -> list[str]:
        """For the next plan: ids that the worker may forget."""
        finished, self.finished_ids = self.finished_ids, []
        return finished

    def preempt(self, victim: Request) -> None:
        """Completion plus resubmission: the worker forgets the victim, which comes back as a new request."""
        self._kv.free(victim)
        self.running.remove(victim)
        self.finished_ids.append(victim.request_id)
        victim.preempt()
        self._policy.requeue(victim)
        for observer in self._observers:
            observer.preempted(victim)

    def grow(self, request: Request, growth: Growth) -> Sequence[EngineCoreOutput]:
        """Do what the group of ``request`` has decided."""
        for output in growth.outputs:
            self.owing.pop(output.request_id, None)
        if growth.parked:
            self.running.remove(request)
            self.finished_ids.append(request.request_id)
            request.park()
        for parent, child in reversed(growth.born):  # each goes before those that wait
            self._bear(parent, child)
        for ended in growth.ended:
            self.finish(ended)
        return growth.outputs

    def _bear(self, parent: Request, child: Request) -> None:
        """``child`` waits, before all others, with its parent's blocks, or what tiers have kept of them."""
        if parent.holds_blocks:
            num_tokens = child.num_tokens - 1  # its last one was just sampled
            self._kv.fork(parent, child, num_tokens)
            child.hold(num_tokens)
        else:
            self._kv.tiers.swaps.inherit(parent.request_id, child)
        self.requests[child.request_id] = child
        self._policy.requeue(child)

    def fail(self, request_id: str, fault: RequestFault) -> list[EngineCoreOutput]:
        """:meth:`end`, for ``fault``."""
        return self.end(request_id, FinishReason.ERROR, fault)

    def end(self, request_id: str, reason: FinishReason, error: RequestFault | None = None) -> list[EngineCoreOutput]:
        """End a request, or an output that no request gives yet, and what cannot go on without it; their messages."""
        request = self.requests.get(request_id)
        group = request.sample_group if request is not None else self.owing.get(request_id)
        if group is None:
            return []
        ended, told = group.end(request_id, request)
        outputs = []
        for name in told:
            self.owing.pop(name, None)
            if (one := self.requests.get(name)) is not None:
                outputs.append(one.output([], finish_reason=reason, error=error))
            else:
                outputs.append(EngineCoreOutput(request_id=name, finish_reason=reason, error=error))
        for one in ended:
            self.finish(one, spoiled=error is not None)
        return outputs

    def finish(self, request: Request, *, spoiled: bool = False) -> None:
        """``request`` is gone. ``spoiled``: it failed, and its blocks may hold anything."""
        if request.holds_blocks:
            if not spoiled:
                self._kv.share(request)
            self._kv.free(request, spoiled=spoiled)
        self._kv.tiers.swaps.drop(request.request_id)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.finished_ids.append(request.request_id)
        elif request.status is not RequestStatus.PARKED:
            self._policy.remove(request)
        del self.requests[request.request_id]
        request.finish()
        for observer in self._observers:
            observer.finished(request)

    def check(self, in_flight: Iterable[Scheduled], max_num_seqs: int) -> None:
        """Every request is in one state and one list, and its lengths are in order. Raises InvariantError.

        ``in_flight``: all entries of plans whose results are not here yet.
        """
        waiting = list(self._policy)
        parked = [request for request in self.requests.values() if request.status is RequestStatus.PARKED]
        listed = [request.request_id for request in [*self.running, *waiting, *parked]]
        if sorted(listed) != sorted(self.requests):
            raise InvariantError(f"in some state are {sorted(listed)}, known are {sorted(self.requests)}")
        if self.owing and not self.requests:
            raise InvariantError(f"no request is left to give the outputs {sorted(self.owing)}")
        if len(self.running) > max_num_seqs:
            raise InvariantError(f"{len(self.running)} running requests, max_num_seqs {max_num_seqs}")
        for request in self.running:
            _check_running(request)
        for request in waiting:
            _check_waiting(request)
        for request in [*self.running, *waiting]:
            if request.num_tokens + request.num_placeholders > request.limit:
                raise InvariantError(f"{request.request_id} has grown beyond its limit of {request.limit} tokens")
        pending = sum(1 + len(entry.draft_token_ids) for entry in in_flight if entry.samples and entry.is_valid)
        if pending != sum(request.num_placeholders for request in self.running):
            raise InvariantError(f"{pending} tokens are being sampled, but requests wait for another number")


def _check_running(request: Request) -> None:
    known = request.num_tokens + request.num_placeholders
    in_order = request.num_confirmed_tokens <= request.num_computed_tokens <= known
    if request.status is not RequestStatus.RUNNING or not in_order:
        raise InvariantError(f"{request.request_id} runs with {request.num_computed_tokens} of {known} tokens")


def _check_waiting(request: Request) -> None:
    if request.status is RequestStatus.RUNNING or request.num_placeholders:
        raise InvariantError(f"{request.request_id} waits, yet it has steps in flight")
    if request.num_computed_tokens not in (0, request.num_tokens - 1):
        raise InvariantError(f"{request.request_id} waits with {request.num_computed_tokens} computed tokens")
