"""The tokenizer's contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Thread-safe for encode and decode."""

    vocab_size: int  # ids are in [0, vocab_size); the logits may be wider
    bos_token_id: int | None
    eos_token_ids: list[int]  # tokenizer's EOS plus generation_config's, in that order, no repeats
    chat_template: str | None
    special_token_ids: frozenset[int]
    strips_leading_space: bool  # decode() drops one space at the very start (SentencePiece)

    @property
    def longest_token(self) -> int:
        """The most characters that one token of the vocabulary spells (special tokens may swallow spaces besides)."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in the text are recognised, as in transformers."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; invalid UTF-8 becomes U+FFFD. Ids beyond the vocabulary decode to nothing."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (special tokens: their text)."""
        ...

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary writes it (``"Ġthe"``)."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt as text, rendered in a sandbox. Raises ValidationError if there is no template or it fails."""
        ...
