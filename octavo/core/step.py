"""StepBuilder: the plan of one step while it is being made, with its token budget. Knows neither queues nor blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.kv_cache.manager import NO_ROOM_NEEDED, Room
from octavo.core.request import Request
from octavo.messages import CachedRequestData, KVMove, ModelRunnerOutput, NewRequestData, RequestFault, SchedulerOutput


class Scheduled:
    """One request in one step: positions ``start .. start + num_tokens`` and whether the next token is sampled."""

    __slots__ = ("draft_token_ids", "epoch", "is_new", "num_tokens", "request", "room", "samples", "start")

    def __init__(self, request: Request, num_tokens: int, room: Room, is_new: bool) -> None:
        self.request = request
        self.epoch = request.epoch
        self.start = request.num_computed_tokens
        self.num_tokens = num_tokens
        self.room = room  # its block_ids: the whole table of a new request, else only what was added
        self.is_new = is_new
        self.samples = request.advance(num_tokens)
        self.draft_token_ids: Sequence[int] = ()  # the last of the positions, if it tries any

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_valid(self) -> bool:
        """False once the request was finished or preempted after this step was planned."""
        return self.request.epoch == self.epoch

    def error(self, result: ModelRunnerOutput) -> RequestFault | None:
        """Why the request failed in this step, whose ``result`` this is, if it did."""
        error = result.errors.get(self.request.request_id)
        if error is None and self.samples and not result.sampled_token_ids.get(self.request.request_id):
            return RequestFault("internal error: no token was sampled")
        return error


class StepBuilder:
    """Collects requests until ``token_budget`` tokens are planned."""

    __slots__ = ("_scheduled", "num_preempted", "step_id", "tokens_left")

    def __init__(self, step_id: int, token_budget: int) -> None:
        self.step_id = step_id
        self.tokens_left = token_budget
        self.num_preempted = 0
        self._scheduled: dict[str, Scheduled] = {}

    def __len__(self) -> int:
        """Number of requests that are planned so far."""
        return len(self._scheduled)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._scheduled

    @property
    def scheduled(self) -> Iterable[Scheduled]:
        """What is planned so far."""
        return self._scheduled.values()

    @property
    def last(self) -> Scheduled:
        """What was added last."""
        return next(reversed(self._scheduled.values()))

    def add(self, request: Request, num_tokens: int, room: Room, *, is_new: bool = False) -> None:
        """Plan ``num_tokens`` (1 .. tokens_left) of ``request``, and count them as computed."""
        self._scheduled[request.request_id] = Scheduled(request, num_tokens, room, is_new)
        self.tokens_left -= num_tokens

    def speculate(self, entry: Scheduled, draft_token_ids: Sequence[int], room: Room) -> None:
        """Plan drafts (1 .. tokens_left of them) behind the last known token of ``entry``, which is in the plan.

        ``room``: new blocks for them, if any.
        """
        count = len(draft_token_ids)
        entry.request.speculate(count)
        entry.draft_token_ids = draft_token_ids
        entry.num_tokens += count
        entry.room = entry.room._replace(block_ids=[*entry.room.block_ids, *room.block_ids])
        self.tokens_left -= count

    def undo(self, victim: Request) -> Room:
        """``victim`` is being preempted: as :meth:`remove`, and counted."""
        self.num_preempted += 1
        return self.remove(victim)

    def remove(self, request: Request) -> Room:
        """Take ``request`` out of the plan, if it is in, and give its tokens back; the room it had got in this step."""
        entry = self._scheduled.pop(request.request_id, None)
        if entry is None:
            return NO_ROOM_NEEDED
        self.tokens_left += entry.num_tokens
        return entry.room

    def build(self, finished_request_ids: list[str], kv_moves: Sequence[KVMove] = ()) -> SchedulerOutput:
        """The message to the workers.

        Block copies are in the order of planning: a block may be read, given up and then be written by a later copy.
        """
        new, cached = [], []
        copies: list[tuple[int, int]] = []
        for request_id, entry in self._scheduled.items():
            block_ids, num_replaced, own_copies = entry.room
            copies += own_copies
            if entry.is_new:
                new.append(_new_request_data(entry))
            else:
                cached.append(
                    CachedRequestData(
                        request_id=request_id,
                        num_computed_tokens=entry.start,
                        new_block_ids=block_ids,
                        num_replaced=num_replaced,
                    )
                )
        return SchedulerOutput(
            step_id=self.step_id,
            num_scheduled_tokens={request_id: entry.num_tokens for request_id, entry in self._scheduled.items()},
            new_requests=new,
            cached_requests=cached,
            finished_request_ids=finished_request_ids,
            kv_moves=list(kv_moves),
            block_copies=copies,
            draft_token_ids={
                request_id: list(entry.draft_token_ids)
                for request_id, entry in self._scheduled.items()
                if entry.draft_token_ids
            },
        )


def _new_request_data(entry: Scheduled) -> NewRequestData:
    request = entry.request
    return NewRequestData(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=entry.start,
        block_ids=entry.room.block_ids,
        sampling_params=request.sampling_params,
        sample_index=request.source.sample_index,
        output=request.source.output,
        siblings=request.sample_group.siblings(),
    )
