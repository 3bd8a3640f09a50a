"""The checker's process: reads constraints, answers with their grammars. May be killed, or crash, at any time.

llguidance overflows the stack on some grammars and works for minutes on others; here that harms no request. The process
has a low priority (``checker`` starts it so), a bounded memory and a small stack; it ends when its standard input does.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
import threading
import time
from random import Random
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from octavo.exceptions import OctavoError, ValidationError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.compiler import compile_grammar
from octavo.structured_output.ebnf import is_ebnf
from octavo.structured_output.translate import refuse, translate
from octavo.structured_output.vocabulary import byte_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

STACK_BYTES = 4 << 20
DATA_BYTES = 384 << 20
STEPS, WALK = 300, 100  # in all, and from one beginning
WALK_SECONDS = 0.1  # of CPU time
TOO_COSTLY = "every token takes too much work; make the grammar simpler or less ambiguous"
LENGTH_BYTES = 4
NOT_ZERO = re.compile(rb"[^\0]")


class Setup(msgspec.Struct, frozen=True):
    """What the process needs to know of the model, and after how long to give up if it is not killed."""

    special: dict[str, int]
    eos_token_ids: list[int]
    vocab_size: int
    timeout: float  # seconds


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar, or what is wrong with which field."""

    grammar: str | None = None
    message: str = ""
    parameter: str | None = None


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message, None at the end."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def try_out(matcher: LLMatcher) -> str | None:
    """What is wrong with a grammar that compiles: random walks show what it costs to follow it.

    Among bytes a step is cheaper than among tokens, by as much for every grammar: usual ones take 3 to 15 ms for all
    walks, those that would hold up others from 0.1 s to many seconds. A grammar may hide from walks what it costs
    elsewhere; then llguidance's own limits and the matcher's budget (``bank``) are left.
    """
    random, seconds = Random(0), 0.0
    for step in range(STEPS):
        start = time.thread_time()
        mask = matcher.compute_bitmask()
        seconds += time.thread_time() - start
        if matcher.is_error():
            if step == 0:
                return "no text can satisfy it, or it takes too much work to find one"
            return None if matcher.stop_reason().startswith("NoExtension") else TOO_COSTLY
        if seconds > WALK_SECONDS:
            return TOO_COSTLY
        if matcher.is_stopped() or step % WALK == WALK - 1:
            matcher.reset()
            continue
        token_id = random.choice(_bits(mask))
        start = time.thread_time()
        matcher.consume_token(token_id)
        seconds += time.thread_time() - start
    return None


def _bits(mask: bytes) -> list[int]:
    """Numbers of the set bits. Few of many: a byte that is zero costs next to nothing."""
    return [8 * one.start() + bit for one in NOT_ZERO.finditer(mask) for bit in range(8) if one[0][0] >> bit & 1]


class _Judge:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._vocabulary = byte_vocabulary(setup.special, setup.eos_token_ids, setup.vocab_size)

    def verdict(self, params: StructuredOutputsParams) -> Verdict:
        try:
            grammar = translate(params, self._setup.special)
            try:
                fault = try_out(compile_grammar(self._vocabulary, grammar))
                if fault is not None:
                    raise refuse(params, fault)
            except ValidationError:
                raise
            except OctavoError as error:
                raise refuse(params, _plain(params, str(error))) from None
            return Verdict(grammar=grammar)
        except ValidationError as error:
            return Verdict(message=str(error), parameter=error.parameter)


def _plain(params: StructuredOutputsParams, message: str) -> str:
    """Lines are those of the grammar that was sent, or none."""
    is_lark = params.grammar is not None and not is_ebnf(params.grammar)
    plain = message if is_lark else re.sub(r"^line \d+: ", "", message)
    return plain.replace("failed to compile JSON schema: ", "")


def serve(commands: BinaryIO, answers: BinaryIO) -> None:
    """Answer until ``commands`` ends."""
    first = read_frame(commands)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    judge = _Judge(setup)
    decoder = msgspec.msgpack.Decoder(StructuredOutputsParams)
    while (data := read_frame(commands)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * setup.timeout + 1)  # ends the process
        answers.write(frame(msgspec.msgpack.encode(judge.verdict(decoder.decode(data)))))
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Entry point. The signal of the timer is left to its default, which needs no cooperation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
