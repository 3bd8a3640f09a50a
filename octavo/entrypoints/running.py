"""The answers that are being made, by every id their client may know them by, so that one can be aborted."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field

from octavo.entrypoints.access import Caller

Abort = Callable[[], Awaitable[None]]


@dataclass(eq=False)
class _Answer:
    abort: Abort
    owner: str  # a caller's name


@dataclass
class RunningAnswers:
    """Ids may repeat: an id stands for every running answer that was given it."""

    _answers: dict[str, set[_Answer]] = field(default_factory=lambda: defaultdict(set))
    count: int = 0

    @contextlib.contextmanager
    def track(self, ids: Collection[str], abort: Abort, owner: Caller) -> Iterator[None]:
        """Within, ``abort`` is called when ``owner`` or an administrator asks to abort one of ``ids``."""
        answer = _Answer(abort, owner.name)
        names = set(ids)
        for name in names:
            self._answers[name].add(answer)
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            for name in names:
                self._answers[name].remove(answer)
                if not self._answers[name]:
                    del self._answers[name]

    async def abort(self, request_id: str, caller: Caller) -> int:
        """Abort all of ``caller`` (an administrator: of anybody) that runs under ``request_id``; how many that were."""
        answers = [a for a in self._answers.get(request_id, ()) if caller.admin or a.owner == caller.name]
        for answer in answers:
            await answer.abort()
        return len(answers)
