"""What a command tells the person who started it: text on the terminal, or log lines where the log is JSON."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from octavo.utils.logs import is_json

logger = logging.getLogger("octavo.cli")


def announce(text: str) -> None:
    """A line about how things stand."""
    if is_json():
        logger.info("%s", text)
    else:
        print(text, flush=True)


def complain(text: str) -> None:
    """The line that says why a command ends."""
    if is_json():
        logger.error("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def announce_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """A screen of (name, fact), or one line of the log with all of them."""
    if is_json():
        logger.info("%s", title, extra={"fields": {"facts": dict(facts)}})
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = max(len(name) for name, _ in facts)
    console.print(title, style="bold")
    for name, text in facts:
        console.print(Text.assemble((f"  {name:{width}}  ", "cyan"), text))
    sys.stdout.flush()
