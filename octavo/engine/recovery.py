"""What becomes of the requests that a dead engine core had. Knows nothing of processes and sockets.

its caller has been given a part ──▶ ends with an error
it is to blame                  ──▶ ends with an error, and the like of it is not taken in for a while
else                            ──▶ is computed again, its output held back until no request is on trial
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from octavo.engine.live_request import LiveRequest
from octavo.engine.quarantine import Quarantine
from octavo.exceptions import DeadlyRequestError, EngineDeadError, EngineRestartingError, OctavoError
from octavo.messages import RequestFault

logger = logging.getLogger(__name__)

End = Callable[[LiveRequest, type[OctavoError], RequestFault], None]


class Recovery:
    """``requests`` is a view of all that the core has not answered; ``end`` ends one, which leaves the view, too."""

    def __init__(self, quarantine: Quarantine, requests: Collection[LiveRequest], end: End) -> None:
        self._quarantine, self._requests, self._end = quarantine, requests, end

    def sort_out(self, death: EngineDeadError, on_trial: LiveRequest | None) -> list[LiveRequest]:
        """End those of the dead core's requests that are to blame, or have been read in part; return the others.

        The request ``on_trial`` is to blame; without one, those that have been computed again before. So are those in
        quarantine.
        """
        again = []
        lost = [live for live in self._requests if live.times_submitted]
        if on_trial is None:
            self._quarantine.count_death(live.request for live in lost)
        elif on_trial in lost:
            self._quarantine.convict(on_trial.request)
        for live in lost:
            if live.collector.was_read:
                fault = RequestFault("the engine core died in the middle of this answer; please ask again", str(death))
                self._end(live, EngineDeadError, fault)
            elif (
                live is on_trial
                or (on_trial is None and live.times_submitted > 1)
                or self._quarantine.holds(live.request)
            ):
                fault = RequestFault("the engine core died twice while it computed this request", str(death))
                self._end(live, DeadlyRequestError, fault)
            else:
                live.collector.hold()  # what comes of it may be void once more
                again.append(live)
        logger.warning(
            "of %d requests that the core had, %d are to be computed again; the others ended", len(lost), len(again)
        )
        return again

    def release(self) -> None:
        """No request is on trial: outputs that were held back may be read."""
        for live in self._requests:
            live.collector.release()

    def refuse_waiting(self) -> None:
        """The new core takes too long: every request that waits for it ends, to be sent again by its client."""
        self.end_all(EngineRestartingError, RequestFault("the engine core is restarting; please ask again"))

    def end_all(self, kind: type[OctavoError], fault: RequestFault) -> None:
        """End every request that has not ended."""
        for live in list(self._requests):
            self._end(live, kind, fault)
