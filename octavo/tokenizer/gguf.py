"""A tokenizer out of GGUF metadata: byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``).

GGUF has no normalizer, split or decoder of its own: they follow from ``tokenizer.ggml.model`` and ``.pre``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from octavo.exceptions import FormatError, UnsupportedModel
from octavo.formats.gguf import GGUFFile
from octavo.tokenizer import pre_tokenizers
from octavo.tokenizer.fast import SPACE, Description, FastTokenizer

logger = logging.getLogger(__name__)

MAX_CUTTING = 1 << 28  # characters copied to find the merges of a vocabulary: a second; Gemma's needs a twenty-fifth

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type

# Control tokens that end a turn or a document. GGUF has one EOS id, while instruct models may write any of these.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def load_from_gguf(path: str | os.PathLike[str]) -> FastTokenizer:
    """Raises FormatError for missing or contradicting keys, UnsupportedModel for other kinds of tokenizer."""
    return _Metadata(GGUFFile(path)).build()


class _Metadata:
    """The tokenizer's keys, checked against each other."""

    def __init__(self, file: GGUFFile):
        self.path, self._metadata = file.path, file.metadata
        self.model: str = self._get("model", "")
        self.tokens: list[str] = self._get("tokens", [])
        if not self.tokens:
            raise FormatError(self.path, "the file has no tokens", key=PREFIX + "tokens")
        self.vocab = {token: i for i, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            raise FormatError(self.path, "a token appears twice", key=PREFIX + "tokens")
        self.types: list[int] = self._per_token("token_type", NORMAL)

    def _get(self, key: str, default: Any) -> Any:
        return self._metadata.get(PREFIX + key, default)

    def _per_token(self, key: str, default: Any) -> list[Any]:
        values = self._get(key, None)
        if values is None:
            return [default] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise FormatError(self.path, f"{len(values)} values for {len(self.tokens)} tokens", key=PREFIX + key)
        return list(values)

    def token_id(self, role: str) -> int | None:
        value = self._get(f"{role}_token_id", None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            reason = f"{value!r} is not the id of one of the {len(self.tokens)} tokens"
            raise FormatError(self.path, reason, key=f"{PREFIX}{role}_token_id")
        return value

    def build(self) -> FastTokenizer:
        if self.model == "gpt2":
            backend, add_bos = self._byte_level()
        elif self.model == "llama":
            backend, add_bos = self._sentencepiece(), True
        else:
            raise UnsupportedModel(f"{self.path}: tokenizer model {self.model!r}; octavo reads 'gpt2' and 'llama'")
        self._add_special_tokens(backend)
        self._add_bos_and_eos(backend, add_bos)
        return FastTokenizer(backend, self._description())

    def _byte_level(self) -> tuple[Any, bool]:
        from tokenizers import Tokenizer, decoders, models, normalizers

        name = self._get("pre", None)
        if name is None:
            logger.warning("%s: no %spre; text is split as for GPT-2", self.path, PREFIX)
            name = "gpt-2"
        pre = pre_tokenizers.pre_tokenizer_named(name)
        merges = self._merges_in_file()
        backend = Tokenizer(self._bpe(models.BPE, merges, ignore_merges=pre.ignore_merges))
        if pre.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.build(pre)
        backend.decoder = decoders.ByteLevel()
        return backend, pre.add_bos

    def _merges_in_file(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ")[::2] for merge in self._get("merges", [])]
        if not pairs:
            raise FormatError(self.path, "the file has no merges", key=PREFIX + "merges")
        return pairs

    def _bpe(self, bpe: Any, merges: list[tuple[str, str]], **options: Any) -> Any:
        try:
            return bpe(self.vocab, merges, **options)
        except Exception as error:  # the library raises plain Exception
            raise FormatError(self.path, str(error), key=PREFIX + "merges") from error

    def _sentencepiece(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        unknown = self.token_id("unknown")
        unk_token = None if unknown is None else self.tokens[unknown]
        options = {"unk_token": unk_token, "fuse_unk": True, "byte_fallback": "<0x00>" in self.vocab}
        backend = Tokenizer(self._bpe(models.BPE, self._merges_by_score(), **options))
        visible = normalizers.Replace(" ", SPACE)
        plain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._get("add_space_prefix", True):
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible])
            backend.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)])
        else:
            backend.normalizer = visible
            backend.decoder = decoders.Sequence(plain)
        return backend

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece joins the neighbours whose union has the best score, so every way of cutting a token in two
        tokens is a merge, ranked by the whole's score (ties: the earlier token first)."""
        if "tokenizer.ggml.merges" in self._metadata:
            return self._merges_in_file()
        scores = self._per_token("scores", 0.0)
        if (work := sum(len(token) ** 2 for token in self.tokens)) > MAX_CUTTING:
            reason = f"its tokens are too long to be cut in two everywhere: {work} steps, at most {MAX_CUTTING}"
            raise FormatError(self.path, reason, key=PREFIX + "tokens")
        mergeable = {token for token, kind in zip(self.tokens, self.types) if kind == NORMAL}
        ranked = sorted((-scores[i], i) for i, kind in enumerate(self.types) if kind == NORMAL)
        merges: list[tuple[str, str]] = []
        for _, i in ranked:
            token = self.tokens[i]
            for at in range(1, len(token)):  # kept bare: millions of cuts for the largest vocabularies
                left = token[:at]
                if left in mergeable and (right := token[at:]) in mergeable:
                    merges.append((left, right))
        return merges

    def _add_special_tokens(self, backend: Any) -> None:
        """Tokens found in text before it is split: control tokens and the unknown token are special, user-defined are
        plain text to the reader."""
        from tokenizers import AddedToken

        backend.add_tokens(
            [
                AddedToken(token, special=kind != USER_DEFINED, normalized=False)
                for token, kind in zip(self.tokens, self.types)
                if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
            ]
        )

    def _add_bos_and_eos(self, backend: Any, add_bos_by_default: bool) -> None:
        from tokenizers.processors import TemplateProcessing

        bos, eos = self.token_id("bos"), self.token_id("eos")
        before = [self.tokens[bos]] if bos is not None and self._get("add_bos_token", add_bos_by_default) else []
        after = [self.tokens[eos]] if eos is not None and self._get("add_eos_token", False) else []
        if before or after:
            used = [(token, self.vocab[token]) for token in {*before, *after}]
            backend.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=used)

    def _description(self) -> Description:
        roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        ids = {ours: self.token_id(theirs) for theirs, ours in roles.items()}
        special = {f"{role}_token": self.tokens[i] for role, i in ids.items() if i is not None}
        ends = [self.token_id("eot"), self.token_id("eom")]
        ends += [i for token in END_TOKENS if (i := self.vocab.get(token)) is not None and self.types[i] == CONTROL]
        key = "tokenizer.chat_template"
        templates = {
            "default" if name == key else name[len(key) + 1 :]: value
            for name, value in self._metadata.items()
            if (name == key or name.startswith(key + ".")) and isinstance(value, str)
        }
        return Description(special, tuple(i for i in ends if i is not None), templates)
