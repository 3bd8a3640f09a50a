"""Waiting for a checker holds up nobody who asks for something else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.exceptions import OverloadedError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.check_queue import MAX_CHECKS, CheckQueue

PARAMS = StructuredOutputsParams(regex="a")


class Stuck:
    """A checker that answers when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = 0

    def known(self, params: StructuredOutputsParams) -> bool:
        return params.regex == "known"

    def check(self, params: StructuredOutputsParams) -> str:
        self.asked += 1
        self.go.wait(60)
        return "grammar"


async def test_many_slow_grammars_leave_the_threads_of_the_loop_to_others() -> None:
    checker = Stuck()
    queue = CheckQueue(checker)  # type: ignore[arg-type]
    checks = [asyncio.create_task(queue.check(PARAMS)) for _ in range(MAX_CHECKS)]
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "other work"), 30) == "other work"
        with pytest.raises(OverloadedError, match="waiting to be checked") as refused:
            await queue.check(PARAMS)
        assert refused.value.retry_after
        await queue.check(StructuredOutputsParams(regex="known"))
        checks.pop().cancel()  # its client left: the place is free
        await asyncio.sleep(0)
        checks.append(asyncio.create_task(queue.check(PARAMS)))
    finally:
        checker.go.set()
    await asyncio.gather(*checks)
    assert checker.asked == MAX_CHECKS
    await queue.check(PARAMS)
    queue.close()
