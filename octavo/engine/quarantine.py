"""Requests that engine cores died of, known again by what they ask for. Knows nothing of cores and callers.

A request that kills the core is ended when it has done so twice. Its client may send it again, though, and each time
would cost the server two of its restarts: so an equal one is not taken in until the deaths are as old as restarts that
no longer count. Whatever is answered in full is above suspicion.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

import msgspec

from octavo.exceptions import DeadlyRequestError
from octavo.messages import EngineCoreRequest, RequestOutputKind, Tenant

MAX_DEATHS = 2


class Quarantine:
    """Deaths count for ``window`` seconds. ``clock`` gives seconds."""

    def __init__(self, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window, self._clock = window, clock
        self._deaths: dict[bytes, list[float]] = {}  # when, by what was asked for

    def blame(self, requests: Iterable[EngineCoreRequest]) -> None:
        """A core has died while it had these, or of the one that this is; equal ones count once."""
        self._forget()
        for key in {_key(request) for request in requests}:
            self._deaths.setdefault(key, []).append(self._clock())

    def clear(self, request: EngineCoreRequest) -> None:
        """It was answered in full."""
        if self._deaths:
            self._deaths.pop(_key(request), None)

    def check(self, request: EngineCoreRequest) -> None:
        """Raises DeadlyRequestError for what cores have died of too often."""
        if not self._deaths:
            return
        self._forget()
        deaths = self._deaths.get(_key(request), ())
        if len(deaths) >= MAX_DEATHS:
            left = deaths[-MAX_DEATHS] + self._window - self._clock()
            raise DeadlyRequestError(
                f"the engine core has died {len(deaths)} times while it computed a request like this one; it is not "
                f"taken in again for {left:.0f} s"
            )

    def _forget(self) -> None:
        since = self._clock() - self._window
        recent = {key: [when for when in deaths if when > since] for key, deaths in self._deaths.items()}
        self._deaths = {key: deaths for key, deaths in recent.items() if deaths}


def _key(request: EngineCoreRequest) -> bytes:
    """Equal for requests that ask for the same, whoever asks, however urgently, and with whatever seed."""
    params = request.sampling_params.replace(seed=None, output_kind=RequestOutputKind.FINAL_ONLY)
    bare = msgspec.structs.replace(
        request,
        request_id="",
        sampling_params=params,
        arrival_time=0.0,
        deadline=None,
        priority=0,
        tenant=Tenant(),
        cache_salt=None,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(bare), digest_size=16).digest()
