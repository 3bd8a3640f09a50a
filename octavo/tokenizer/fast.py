"""The one Tokenizer implementation: the ``tokenizers`` library, plus what serving needs around it.

It does not know where the tokenizer came from (``hf_folder`` and ``gguf`` build it) nor how text is streamed
(``engine.detokenizer`` does that from ``token_bytes``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from octavo.exceptions import ValidationError
from octavo.tokenizer.byte_level import to_bytes

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"  # SentencePiece's visible space

DecoderKind = Literal["byte_level", "sentencepiece", "other"]


@dataclass(frozen=True)
class Description:
    """What a model says about its tokenizer besides vocabulary and merges."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", ...
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name; the usual one is "default"


class FastTokenizer:
    """See :class:`octavo.tokenizer.base.Tokenizer` for the contract."""

    def __init__(self, backend: tokenizers.Tokenizer, description: Description):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(description.special_tokens)
        self._templates = dict(description.chat_templates)
        self._kind, self.strips_leading_space = _decoder_kind(backend)
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id: int | None = self._id_of("bos_token")
        self._adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]
        eos = self._id_of("eos_token")
        self.eos_token_ids: list[int] = _unique([*([] if eos is None else [eos]), *description.eos_token_ids])
        self.chat_template: str | None = self._templates.get("default")
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def longest_token(self) -> int:
        return max((len(token) for token in self._backend.get_vocab(with_added_tokens=True)), default=1)

    def __repr__(self) -> str:
        return f"FastTokenizer({self.vocab_size} tokens, {self._kind})"

    def _id_of(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. A text that already begins with BOS, such as a rendered chat, does not get a second one.

        Raises ValidationError for text that is not Unicode (a lone surrogate).
        """
        try:
            # the batch calls release the GIL; encode() and decode() would hold up every other request
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise ValidationError(
                "the text holds a lone surrogate, which is not Unicode", parameter="prompt"
            ) from error
        ids: list[int] = encoding.ids
        if add_special_tokens and self._adds_bos and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text. Unlike the library, a SentencePiece run of byte tokens with one bad byte keeps its good characters."""
        known = [i for i in token_ids if 0 <= i < self.vocab_size]
        if self._kind != "sentencepiece":
            (text,) = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
            return str(text)
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(i) for i in known if i not in hidden)
        if self.strips_leading_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, empty beyond the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.token_string(token_id)
        if self._kind == "byte_level":
            return to_bytes(token)
        if self._kind == "sentencepiece":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return token.replace(SPACE, " ").encode()
        text: str = self._backend.decode([token_id], skip_special_tokens=False) if token else ""
        return text.encode()

    def token_string(self, token_id: int) -> str:
        """The vocabulary's spelling, empty beyond the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._backend.id_to_token(token_id) or ""

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
        """The prompt as text, by ``chat_template`` or the model's own (its ``tool_use`` one where tools are given)."""
        from octavo.tokenizer.chat_template import render

        template = chat_template
        if template is None and tools:
            template = self._templates.get("tool_use")
        if template is None:
            template = self.chat_template
        if template is None:
            raise ValidationError("the model has no chat template, and none was given", parameter="messages")
        return render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._special_tokens, "tools": list(tools) if tools else None, "documents": None, **kwargs},
        )


def _unique(ids: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[DecoderKind, bool]:
    """How tokens become text, and whether one leading space is dropped."""
    if backend.decoder is None:
        return "other", False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"]:
        return "sentencepiece", steps[0].get("prepend_scheme", "always") != "never"
    replaces_space = any(s["type"] == "Replace" and s["pattern"] == {"String": SPACE} for s in steps)
    if replaces_space and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strips = any(s["type"] == "Strip" and s["content"] == " " and s["start"] == 1 for s in steps)
        return "sentencepiece", strips
    return "other", False
