"""``octavo chat``: a conversation in the terminal, streaming, with the engine in this process."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from octavo.args.engine_args import add_engine_arguments
from octavo.cli.session import Session, add_sampling_arguments
from octavo.exceptions import ValidationError

HELP = "/exit leaves, /clear forgets the conversation, /help shows this. Ctrl-C stops an answer, Ctrl-D leaves."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="system message that opens the conversation")
    add_sampling_arguments(parser, max_tokens=None)
    add_engine_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Read a line, answer it, until /exit or the end of input."""
    session = Session(namespace)
    try:
        Dialogue(session, namespace.system, interactive=sys.stdin.isatty()).run()
    finally:
        session.close()
    return 0


class Dialogue:
    """The messages so far. ``interactive`` shows a prompt, a greeting and the speed."""

    def __init__(self, session: Session, system: str | None, *, interactive: bool) -> None:
        self.session, self.interactive = session, interactive
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def run(self) -> None:
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  history and editing of the line
            print(f"{self.session.model_name}. {HELP}")
        while (line := self._read()) is not None:
            if line == "/exit":
                return
            if line == "/clear":
                self.messages = list(self._opening)
            elif line == "/help":
                print(HELP)
            elif line:
                self.answer(line)

    def _read(self) -> str | None:
        """The next line, or None at the end of input. Ctrl-C starts the line over."""
        while True:
            try:
                return input("> " if self.interactive else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                print()

    def answer(self, line: str) -> None:
        """Stream the answer to ``line``. One that cannot be asked (too long) leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": line}]
        text, tokens, started = "", 0, time.monotonic()
        try:
            for output in self.session.stream(self.session.chat_prompt(asked)):
                sample = output.outputs[0]
                print(sample.text, end="", flush=True)
                text += sample.text
                tokens += len(sample.token_ids)
                if sample.finish_reason == "error":
                    print(f"\n[{sample.stop_reason}]", end="")
        except ValidationError as error:
            print(f"[{error}]")
            return
        print()
        if self.interactive and tokens:
            seconds = time.monotonic() - started
            print(f"\x1b[2m{tokens} tokens, {tokens / seconds:.1f} tokens/s\x1b[0m")
        self.messages = [*asked, {"role": "assistant", "content": text}]
