"""Progress in the terminal, on stderr, so that answers on stdout stay clean."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

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
