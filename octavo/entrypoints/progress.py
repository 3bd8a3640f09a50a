"""Progress in the terminal, on stderr, so that answers on stdout stay clean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def download_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A ``progress`` callback for ``resolve_model``: a bar on a terminal, a line a file elsewhere.

    Nothing is drawn unless something is fetched.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total or None)
                if not console.is_terminal:
                    console.print(f"fetching {name}", highlight=False)
            bar.update(tasks[name], completed=done, total=total or None)

        yield progress
