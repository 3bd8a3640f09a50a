"""What a command tells the person who started it: text on the terminal, or log lines where the log is JSON.

A reader that has gone (``octavo serve | head``) is no reason to end: what it would have been told goes nowhere.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from octavo.utils.logs import is_json

logger = logging.getLogger("octavo.cli")


def announce(text: str) -> None:
    """A line about how things stand."""
    if is_json():
        logger.info("%s", text)
    else:
        _write(text, sys.stdout)


def complain(text: str) -> None:
    """The line that says why a command ends."""
    if is_json():
        logger.error("%s", text)
    else:
        _write(text, sys.stderr)


def announce_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """A screen of (name, fact), or one line of the log with all of them."""
    if is_json():
        logger.info("%s", title, extra={"fields": {"facts": dict(facts)}})
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = max(len(name) for name, _ in facts)
    with console.capture() as screen:  # rich itself would end the process for a reader that has gone
        console.print(title, style="bold")
        for name, text in facts:
            console.print(Text.assemble((f"  {name:{width}}  ", "cyan"), text))
    _write(screen.get().removesuffix("\n"), sys.stdout)


def _write(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # also what is still buffered
