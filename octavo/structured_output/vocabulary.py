"""The tokenizer as llguidance wants it: the bytes of every token.

Special tokens stand for nothing that text could spell, so no grammar of characters ever allows one; a grammar names
them outright. Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from octavo.tokenizer.base import Tokenizer


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens by their text."""
    return {tokenizer.token_string(i): i for i in sorted(tokenizer.special_token_ids)}


class _Tokens:
    """What ``LLTokenizer`` reads of a Python tokenizer: the bytes of each token, which of them are special."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, list(special), eos

    def __call__(self, text: str) -> list[int]:
        """Never called: no grammar is compiled without ``no_forcing`` (``translate.OPTIONS``)."""
        return []


def model_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Of the model, for masks of ``max(vocab_size, tokenizer.vocab_size)`` bits. 0.1 to 0.6 s, holding the GIL.

    Tokens beyond the tokenizer spell nothing and are never allowed. The tokenizer has an EOS token.
    """
    size = max(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(size)]
    return _make(tokens, sorted(tokenizer.special_token_ids), tokenizer.eos_token_ids)


def byte_vocabulary(special: Mapping[str, int], eos: Sequence[int], vocab_size: int) -> LLTokenizer:
    """A stand-in that is made in a millisecond: the model's special tokens, and the 256 bytes at any other ids.

    A grammar compiles with it exactly if it does with the model's own.
    """
    tokens = [b""] * max(vocab_size, 256 + len(special), *(i + 1 for i in special.values()))
    for text, i in special.items():
        tokens[i] = text.encode()
    free = (i for i in range(len(tokens)) if not tokens[i])
    for byte in range(256):
        tokens[next(free)] = bytes([byte])
    return _make(tokens, sorted(special.values()), eos)


def _make(tokens: list[bytes], special: Sequence[int], eos: Sequence[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    wrapped: Any = _Tokens(tokens, special, eos[0])
    return LLTokenizer(wrapped, eos_token=list(eos))
