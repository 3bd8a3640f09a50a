"""What is true of a scheduler's books between any two calls. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from octavo.core.request import Request, RequestStatus
from octavo.core.step import Scheduled
from octavo.exceptions import InvariantError


def check_books(
    requests: Mapping[str, Request],
    running: Sequence[Request],
    waiting: Sequence[Request],
    *,
    owed: Collection[str],
    in_flight: Iterable[Scheduled],
    max_num_seqs: int,
) -> None:
    """Every request is in one state and one list, and its lengths are in order. Raises InvariantError.

    ``owed``: ids of outputs for which there is no request yet; ``in_flight``: all that is planned and not taken in.
    """
    parked = [request for request in requests.values() if request.status is RequestStatus.PARKED]
    listed = [request.request_id for request in [*running, *waiting, *parked]]
    if sorted(listed) != sorted(requests):
        raise InvariantError(f"in some state are {sorted(listed)}, known are {sorted(requests)}")
    if owed and not requests:
        raise InvariantError(f"nobody is left to give the outputs {sorted(owed)}")
    if len(running) > max_num_seqs:
        raise InvariantError(f"{len(running)} running requests, max_num_seqs {max_num_seqs}")
    for request in running:
        known = request.num_tokens + request.num_placeholders
        in_order = request.num_confirmed_tokens <= request.num_computed_tokens <= known
        if request.status is not RequestStatus.RUNNING or not in_order:
            raise InvariantError(f"{request.request_id} runs with {request.num_computed_tokens} of {known} tokens")
    for request in waiting:
        if request.status is RequestStatus.RUNNING or request.num_placeholders:
            raise InvariantError(f"{request.request_id} waits, yet it has steps in flight")
        if request.num_computed_tokens not in (0, request.num_tokens - 1):
            raise InvariantError(f"{request.request_id} waits with {request.num_computed_tokens} computed tokens")
    for request in [*running, *waiting]:
        if request.num_tokens + request.num_placeholders > request.limit:
            raise InvariantError(f"{request.request_id} has grown beyond its limit of {request.limit} tokens")
    pending = sum(1 + len(entry.draft_token_ids) for entry in in_flight if entry.samples and entry.is_valid)
    if pending != sum(request.num_placeholders for request in running):
        raise InvariantError(f"{pending} tokens are being sampled, but requests wait for another number")
