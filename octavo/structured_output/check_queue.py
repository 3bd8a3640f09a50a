"""Grammars that wait to be checked, on behalf of an event loop. Knows nothing of how a check is done.

They have threads of their own: on the event loop's, a client with many slow grammars would keep the long texts of all
clients from being tokenised.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from octavo.exceptions import OverloadedError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.checker import MAX_PROCESSES, GrammarChecker

MAX_CHECKS = 32  # under way or waiting
RETRY_SECONDS = 5.0


class CheckQueue:
    """First come, first served. Lives on one event loop."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="grammar-check")
        self._num_checks = 0

    async def check(self, params: StructuredOutputsParams) -> None:
        """As ``GrammarChecker.check``, which answers at once afterwards. Raises OverloadedError if too many wait."""
        if self._checker.known(params):
            return
        if self._num_checks >= MAX_CHECKS:
            message = f"{MAX_CHECKS} grammars are waiting to be checked already; try again later"
            raise OverloadedError(message, reason="grammars", retry_after=RETRY_SECONDS)
        self._num_checks += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._checker.check, params)
        finally:
            self._num_checks -= 1

    def close(self) -> None:
        """Drop what waits. What is under way ends when the checker is closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
