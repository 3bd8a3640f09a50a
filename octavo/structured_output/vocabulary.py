"""The tokenizer as llguidance wants it: the bytes of every token, and text cut into tokens as the model would.

Special tokens stand for nothing that text could spell, so no grammar of characters ever allows one; a grammar names
them outright. Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from octavo.tokenizer.base import Tokenizer

SENTINEL = "\x02"  # keeps a tokenizer from putting its leading space before the text


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens by their text."""
    return {tokenizer.token_string(i): i for i in sorted(tokenizer.special_token_ids)}


class _Wrapped:
    """What ``LLTokenizer`` reads of a Python tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, list(special), eos


class _Bytes(_Wrapped):
    """One token a byte."""

    def __call__(self, text: str) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text.encode()]


class _Model(_Wrapped):
    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        tokens = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(size)]
        super().__init__(tokens, sorted(tokenizer.special_token_ids), tokenizer.eos_token_ids[0])
        self._tokenizer = tokenizer
        self._ids: dict[bytes, int] | None = None

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell exactly ``text``: the model's own where its normalisation allows."""
        wanted = text.encode()
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._spelt(ids) == wanted:
            return ids
        ids = self._tokenizer.encode(SENTINEL + text, add_special_tokens=False)
        for cut in range(1, min(4, len(ids) + 1)):
            if self._spelt(ids[:cut]).lstrip(b" ") == SENTINEL.encode() and self._spelt(ids[cut:]) == wanted:
                return ids[cut:]
        return self._greedy(wanted)

    def _spelt(self, ids: Sequence[int]) -> bytes:
        hidden = self._tokenizer.special_token_ids
        return b"".join(b"\xff" if i in hidden else self.tokens[i] for i in ids)

    def _greedy(self, wanted: bytes) -> list[int]:
        """The longest token each time; what no token spells is left out."""
        if self._ids is None:
            hidden = self._tokenizer.special_token_ids
            self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in hidden}
        ids, start, longest = [], 0, max(map(len, self._ids), default=1)
        while start < len(wanted):
            for end in range(min(len(wanted), start + longest), start, -1):
                found = self._ids.get(wanted[start:end])
                if found is not None:
                    ids.append(found)
                    break
            else:
                end = start + 1
            start = end
        return ids


def _make(wrapped: Any, eos: Sequence[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(wrapped, eos_token=list(eos))


def model_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Of the model, for masks of ``max(vocab_size, tokenizer.vocab_size)`` bits. 0.1 to 0.6 s, holding the GIL.

    Tokens beyond the tokenizer spell nothing and are never allowed. The tokenizer has an EOS token.
    """
    wrapped = _Model(tokenizer, max(vocab_size, tokenizer.vocab_size))
    return _make(wrapped, tokenizer.eos_token_ids)


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
    return _make(_Bytes(tokens, sorted(special.values()), eos[0]), eos)
