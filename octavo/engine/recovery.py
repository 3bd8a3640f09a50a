"""What becomes of the requests that a dead engine core had. Knows nothing of processes and sockets.

its caller has been given a part ──▶ ends with an error
it is to blame                  ──▶ ends with an error, and the like of it is not taken in for a while
else                            ──▶ is computed again, its output held back until no suspect is left
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from octavo.config import SupervisorConfig
from octavo.engine.output_collector import OutputCollector
from octavo.engine.parallel_sampling import ParentRequest
from octavo.engine.quarantine import Quarantine
from octavo.exceptions import DeadlyRequestError, EngineDeadError, EngineRestartingError, OctavoError
from octavo.messages import RequestFault

logger = logging.getLogger(__name__)

End = Callable[[ParentRequest, type[OctavoError], RequestFault], None]


class Recovery:
    """``collectors`` is a live mapping of all requests with open streams; ``end`` ends one with an error."""

    def __init__(self, config: SupervisorConfig, collectors: Mapping[ParentRequest, OutputCollector], end: End) -> None:
        self._collectors, self._end = collectors, end
        self.quarantine = Quarantine(config)

    @property
    def unfinished(self) -> list[ParentRequest]:
        return [parent for parent in self._collectors if not parent.finished]

    def sort_out(self, death: EngineDeadError, suspect: ParentRequest | None) -> list[ParentRequest]:
        """Of what the dead core had: end what its caller has seen a part of, and what is to blame; return the rest.

        To blame is the ``suspect`` that was on trial; without one, whoever has been computed again before, and what
        is in quarantine.
        """
        again = []
        lost = [parent for parent in self.unfinished if parent.times_submitted]
        if suspect is None:
            self.quarantine.suspect(parent.request for parent in lost)
        elif suspect in lost:
            self.quarantine.convict(suspect.request)
        for parent in lost:
            collector = self._collectors[parent]
            if collector.taken:
                fault = RequestFault("the engine core died in the middle of this answer; please ask again", str(death))
                self._end(parent, EngineDeadError, fault)
            elif (
                parent is suspect
                or (suspect is None and parent.times_submitted > 1)
                or self.quarantine.holds(parent.request)
            ):
                fault = RequestFault("the engine core died twice while it computed this request", str(death))
                self._end(parent, DeadlyRequestError, fault)
            else:
                collector.hold()  # what comes of it may be void once more
                again.append(parent)
        logger.warning(
            "of %d requests that the core had, %d are to be computed again; the others ended", len(lost), len(again)
        )
        return again

    def release(self) -> None:
        """No suspect is left: what was held back may be seen."""
        for collector in self._collectors.values():
            collector.release()

    def refuse_waiting(self) -> None:
        """The new core takes too long: whoever waits for it is told to come again."""
        self.end_all(EngineRestartingError, RequestFault("the engine core is restarting; please ask again"))

    def end_all(self, kind: type[OctavoError], fault: RequestFault) -> None:
        """Whatever has not ended does so now."""
        for parent in self.unfinished:
            self._end(parent, kind, fault)
