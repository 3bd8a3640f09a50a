"""Whether a grammar accepts a text, over a vocabulary of bytes and three special tokens."""

from __future__ import annotations

import re

from octavo.messages import StructuredOutputsParams
from octavo.structured_output.compiler import compile_grammar
from octavo.structured_output.translate import translate
from octavo.structured_output.vocabulary import byte_vocabulary

SPECIAL = {"<eos>": 300, "<|tool|>": 301, "<|end|>": 302}
VOCABULARY = byte_vocabulary(SPECIAL, [300], 303)


def tokens(text: str) -> list[int]:
    """``text`` byte by byte, special tokens as themselves."""
    pieces = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [i for piece in pieces for i in ([SPECIAL[piece]] if piece in SPECIAL else piece.encode())]


def misjudged(grammar: str, good: list[str], bad: list[str]) -> list[str]:
    """Of ``good``, what the grammar refuses; of ``bad``, what it accepts."""
    start = compile_grammar(VOCABULARY, grammar)
    wrong = []
    for text in good + bad:
        matcher, ids = start.deep_copy(), tokens(text)
        accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        if accepted != (text in good):
            wrong.append(text)
    return wrong


def misjudged_by(params: StructuredOutputsParams, good: list[str], bad: list[str]) -> list[str]:
    """:func:`misjudged` of what ``params`` ask for."""
    return misjudged(translate(params, SPECIAL), good, bad)
