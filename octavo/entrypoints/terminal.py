"""What an engine in a terminal's process needs: a bar for downloads, and Ctrl-C between two steps, never within one.

Progress goes to stderr, so that answers on stdout stay clean.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from octavo.utils.logs import is_json

logger = logging.getLogger("octavo.cli")


@contextlib.contextmanager
def download_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A ``progress`` callback for ``resolve_model``: a bar on a terminal, a line a file elsewhere and in a JSON log.

    Nothing is drawn unless something is fetched.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    drawn = console.is_terminal and not is_json()
    with Progress(*columns, console=console, disable=not drawn) as bar:

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total or None)
                if is_json():
                    logger.info("fetching %s", name)
                elif not drawn:
                    console.print(f"fetching {name}", highlight=False)
            bar.update(tasks[name], completed=done, total=total or None)

        yield progress


@contextlib.contextmanager
def interrupt_event() -> Iterator[threading.Event]:
    """Within, Ctrl-C sets the event instead of tearing a step; a second one is raised as usual.

    Outside the main thread, nothing changes.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
