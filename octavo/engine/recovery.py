"""What becomes of the requests that a dead engine core had. Knows nothing of processes and sockets.

its caller has been given a part ──▶ ends with an error
it is to blame                  ──▶ ends with an error, and the like of it is not taken in for a while
else                            ──▶ is computed again, its output held back until no suspect is left
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

    def sort_out(self, death: EngineDeadError, suspect: LiveRequest | None) -> list[LiveRequest]:
        """Of what the dead core had: end what its caller has seen a part of, and what is to blame; return the rest.

        To blame is the ``suspect`` that was on trial; without one, whoever has been computed again before, and what
        is in quarantine.
        """
        again = []
        lost = [live for live in self._requests if live.times_submitted]
        if suspect is None:
            self._quarantine.suspect(live.request for live in lost)
        elif suspect in lost:
            self._quarantine.convict(suspect.request)
        for live in lost:
            if live.collector.taken:
                fault = RequestFault("the engine core died in the middle of this answer; please ask again", str(death))
                self._end(live, EngineDeadError, fault)
            elif (
                live is suspect
                or (suspect is None and live.times_submitted > 1)
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
        """No suspect is left: what was held back may be seen."""
        for live in self._requests:
            live.collector.release()

    def refuse_waiting(self) -> None:
        """The new core takes too long: whoever waits for it is told to come again."""
        self.end_all(EngineRestartingError, RequestFault("the engine core is restarting; please ask again"))

    def end_all(self, kind: type[OctavoError], fault: RequestFault) -> None:
        """Whatever has not ended does so now."""
        for live in list(self._requests):
            self._end(live, kind, fault)
