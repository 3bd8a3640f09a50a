"""RequestBook: every request that is not finished, and what its preemption, its children and its end mean.

For each the queue, the block tables and the worker must be told. Decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.groups import KVManager
from octavo.core.policy import Policy
from octavo.core.request import Request, RequestStatus
from octavo.core.sample_group import Growth, SampleGroup
from octavo.core.stats import SchedulerCounters
from octavo.core.suspects import Suspects
from octavo.exceptions import ValidationError
from octavo.messages import EngineCoreOutput, FinishReason, RequestFault


class RequestBook:
    """Those that wait are in ``policy``'s queue, too."""

    def __init__(self, policy: Policy, kv: KVManager, suspects: Suspects, counters: SchedulerCounters) -> None:
        self._policy = policy
        self._kv = kv
        self._suspects = suspects
        self._counters = counters
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
        self._counters.num_preemptions += 1

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
        self._suspects.clear(request)
        del self.requests[request.request_id]
        request.finish()
