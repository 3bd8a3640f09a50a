"""How byte-level BPE splits text before merging, by the name GGUF files give it (``tokenizer.ggml.pre``).

The regular expressions are part of each model's published tokenizer. A name that is not here is refused: a wrong split
gives plausible tokens and a silently worse model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.exceptions import UnsupportedModel

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"


@dataclass(frozen=True)
class PreTokenizer:
    """``split``: a regular expression whose matches are the words; None: GPT-2's own."""

    split: str | None = None
    digits: bool = False  # first cut every digit off on its own
    nfc: bool = False  # compose characters first
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # where the file does not say


_GPT2 = PreTokenizer()
_STARCODER = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(LLAMA3, ignore_merges=True, add_bos=True)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "codeshell", "refact"), _STARCODER),
    "command-r": PreTokenizer(digits=True, nfc=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), PreTokenizer(LLAMA3)),
    **dict.fromkeys(("qwen2", "stablelm2"), PreTokenizer(QWEN2, nfc=True)),
    "deepseek-r1-qwen": PreTokenizer(QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(GPT4O)),
    "tekken": PreTokenizer(TEKKEN, ignore_merges=True, add_bos=True),
}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """Raises UnsupportedModel for a name that is not in the table."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"pre-tokenizer {name!r} is not known; known are {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def build(pre: PreTokenizer) -> Any:
    """The ``tokenizers`` pre-tokenizer."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    steps: list[Any] = [Digits(individual_digits=True)] if pre.digits else []
    if pre.split is not None:
        steps.append(Split(Regex(pre.split), behavior="isolated"))
    steps.append(ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    return Sequence(steps) if len(steps) > 1 else steps[0]
