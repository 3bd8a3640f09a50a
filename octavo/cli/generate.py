"""``octavo generate PROMPT``: continue one prompt, streaming to stdout."""

from __future__ import annotations

import argparse
import sys

from octavo.args.engine_args import add_engine_arguments
from octavo.cli.session import Session, add_sampling_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    add_sampling_arguments(parser, max_tokens=256)
    add_engine_arguments(parser, positional_model=False)


def run(namespace: argparse.Namespace) -> int:
    """Print the continuation; 130 if Ctrl-C cut it short."""
    text = sys.stdin.read() if namespace.prompt == "-" else namespace.prompt
    session = Session(namespace)
    finished = False
    try:
        prompt = session.chat_prompt([{"role": "user", "content": text}]) if namespace.chat else text
        for output in session.stream(prompt):
            print(output.outputs[0].text, end="", flush=True)
            finished = output.finished
        print()
        failed = output.outputs[0].finish_reason == "error"
        if failed:
            print(f"octavo generate: {output.outputs[0].stop_reason}", file=sys.stderr)
        return 1 if failed else 0 if finished else 130
    finally:
        session.close()
