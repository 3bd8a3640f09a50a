"""``octavo``: one file a sub-command. A command's module is imported only when that command is called."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

BROKEN_PIPE = 128 + 13  # what a shell reports of a process that SIGPIPE ended

COMMANDS = {
    "serve": "OpenAI-compatible server",
    "chat": "talk with a model in the terminal",
    "generate": "continue one prompt",
    "pull": "fetch a model into the cache",
    "plan": "weights and KV memory of a model, before loading it",
    "bench": "measure latency, throughput, a server under load, or its start",
    "verify": "prove on a model that batching, caching and chunking change no bit of an answer",
}


class _CommandParser(argparse.ArgumentParser):
    """Says what is wrong with a command's flags in one line; of an unknown one, also what is near."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            import difflib

            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else f"see {self.prog} --help"
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser with every command's name, and the flags of ``command`` alone."""
    parser = argparse.ArgumentParser(prog="octavo", description="An LLM inference and serving engine.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_CommandParser)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            importlib.import_module(f"octavo.cli.{name}").add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Deliberate errors are one line on stderr, without a traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    parser = build_parser(command)
    namespace = parser.parse_args(argv)
    if namespace.version:
        import octavo

        print(f"octavo {octavo.__version__}")
        return 0
    if namespace.command is None:
        parser.print_help()
        return 2
    from octavo.cli.announce import complain
    from octavo.exceptions import ConfigError, OctavoError

    _forgiving_streams()
    try:
        status: int = importlib.import_module(f"octavo.cli.{namespace.command}").run(namespace)
        return status
    except OctavoError as error:
        complain(f"octavo {namespace.command}: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # "octavo generate ... | head": the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return BROKEN_PIPE


def _forgiving_streams() -> None:
    """Text that a terminal cannot show is replaced, and bytes that are no text are refused as a prompt, not here."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


if __name__ == "__main__":
    sys.exit(main())
