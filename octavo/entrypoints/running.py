"""The answers that are being made, by every id their client may know them by, so that one can be aborted."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field

Abort = Callable[[], Awaitable[None]]


@dataclass(eq=False)
class _Answer:
    abort: Abort


@dataclass
class RunningAnswers:
    """Ids may repeat: an id stands for every running answer that was given it."""

    _answers: dict[str, set[_Answer]] = field(default_factory=lambda: defaultdict(set))
    count: int = 0

    @contextlib.contextmanager
    def track(self, ids: Collection[str], abort: Abort) -> Iterator[None]:
        """Within, ``abort`` is called when somebody asks to abort one of ``ids``."""
        answer = _Answer(abort)
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

    async def abort(self, request_id: str) -> int:
        """Abort all that is running under ``request_id``; how many answers that were."""
        answers = list(self._answers.get(request_id, ()))
        for answer in answers:
            await answer.abort()
        return len(answers)
