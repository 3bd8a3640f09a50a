"""From the text of a grammar to a matcher, within bounds. Knows no cache and no process.

llguidance counts its own work while it compiles and at each step (2000 items in an Earley row, 25,000 a step, 200,000
units of lexer fuel, which is about 15 ms), so most hostile grammars end in an error rather than in a long step. Neither
recursion nor memory is counted, and an item may cost much: that is what the checker's process is for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo.exceptions import OctavoError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance's advice is to set options that requests do not have
REWORDED = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is enforced only where its options cannot both hold, which does not show here; write anyOf"
    ),
}
MAX_ITEMS = 25_000  # a step; a recursive EBNF grammar of JSON needs up to 20,000 with 152k tokens
LONGEST_MESSAGE = 400  # characters


class GrammarError(OctavoError):
    """A grammar does not compile, or allows no text."""


def explain(message: str) -> str:
    """llguidance's words without its internals."""
    if message.startswith("panic"):
        return "the grammar is too large"
    message = re.split(r"<(?:backtrace|non-verbose|state)/?>", message)[0]
    message = re.sub(r"^at (\d+)\(\d+\): ", r"line \1: ", message)
    for theirs, ours in REWORDED.items():
        message = message.replace(theirs, ours)
    lines = [line for line in message.splitlines() if not re.match(r"\s*(?:\d+ \||\^)", line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "..."


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of ``grammar``; copies of it are cheap. Raises GrammarError. Releases the GIL."""
    from llguidance import LLMatcher, LLParserLimits

    # large lexemes are not tried on the whole vocabulary beforehand: that is neither counted nor interruptible
    limits = LLParserLimits(verbose_errors=False, precompute_large_lexemes=False, step_max_items=MAX_ITEMS)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(explain(matcher.get_error()))
    return matcher
