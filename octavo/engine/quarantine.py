"""Requests that engine cores died of, known again by what they ask for. Knows nothing of cores and callers.

A request that kills the core is ended when it has done so twice. Its client may send it again, though, and each time
would cost the server more of its restarts. So an equal one is not taken in, once it is to blame for certain, or was
there at so many deaths that one more would end the server. A request that is answered in full is taken off the list.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable

import msgspec

from octavo.config import SupervisorConfig
from octavo.exceptions import DeadlyRequestError
from octavo.messages import CacheOptions, EngineCoreRequest, ReportOptions, RequestOutputKind, SchedulingOptions

LEAST_DEATHS = 2  # at one death alone, another request may have been to blame


class Quarantine:
    """All of it is forgotten when it is as old as restarts that no longer count. ``clock`` gives seconds."""

    def __init__(self, config: SupervisorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._window, self._most = config.core_restart_window, max(LEAST_DEATHS, config.max_core_restarts)
        self._clock = clock
        self._deaths: dict[bytes, list[float]] = {}  # when, by what was asked for
        self._guilty: dict[bytes, float] = {}  # since when

    def count_death(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Count the death of a core for each of the requests that it had; equal ones count once."""
        now = self._clock()
        self._forget(now)
        for key in {_key(request) for request in requests}:
            deaths = self._deaths.setdefault(key, [])
            deaths.append(now)
            if len(deaths) >= self._most:
                self._guilty[key] = now

    def convict(self, request: EngineCoreRequest) -> None:
        """Put a request in quarantine, of which a core has died for certain."""
        self._guilty[_key(request)] = self._clock()

    def clear(self, request: EngineCoreRequest) -> None:
        """Forget the deaths at which an equal request was there: this one was answered in full."""
        if self._deaths or self._guilty:
            key = _key(request)
            self._deaths.pop(key, None)
            self._guilty.pop(key, None)

    def holds(self, request: EngineCoreRequest) -> bool:
        """Whether the request, or an equal one, is not to be computed (again)."""
        return bool(self._guilty) and self._seconds_left(request) > 0

    def check(self, request: EngineCoreRequest) -> None:
        """Raises DeadlyRequestError for what is not to be taken in."""
        if self.holds(request):
            raise DeadlyRequestError(
                "the engine core died each time that it computed a request like this one; it is not taken in again "
                f"for {self._seconds_left(request):.0f} s"
            )

    def _seconds_left(self, request: EngineCoreRequest) -> float:
        return self._guilty.get(_key(request), -math.inf) + self._window - self._clock()

    def _forget(self, now: float) -> None:
        since = now - self._window
        recent = {key: [when for when in deaths if when > since] for key, deaths in self._deaths.items()}
        self._deaths = {key: deaths for key, deaths in recent.items() if deaths}
        self._guilty = {key: when for key, when in self._guilty.items() if when > since}


def _key(request: EngineCoreRequest) -> bytes:
    """Equal for requests that ask for the same: caller, urgency, seed, reports and wishes of the cache do not count.

    A request is checked before much of that is known of it.
    """
    params = request.sampling_params.replace(seed=None, output_kind=RequestOutputKind.FINAL_ONLY)
    bare = msgspec.structs.replace(
        request,
        request_id="",
        sampling_params=params,
        arrival_time=0.0,
        scheduling=SchedulingOptions(),
        cache=CacheOptions(),
        report=ReportOptions(),
    )
    return hashlib.blake2b(msgspec.msgpack.encode(bare), digest_size=16).digest()
