"""Nasty strings, and small tokenizers trained on the spot, for the tests of tokenizers and of the detokeniser."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>", "<|fim pad|>"]

PARTS = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say we've WON'T it's John's I'D",
    "don't DON'T 'twas ' s 'S 'll",
    "naïve café résumé Ångström Ærøskøbing",
    "cafe\u0301 n\u0303 a\u0328\u0301 e\u0302\u0323 \u1e69 s\u0323\u0307",
    "Z\u0351\u036b\u0343a\u0356\u032fl\u0346\u0348g\u0334o\u0335",
    "你好，世界。今天天气很好！",
    "日本語のテキストとカタカナ、ひらがな、漢字",
    "한국어 텍스트 \u1112\u1161\u11ab",
    "ไทยไม่มีช่องว่าง",
    "مرحبا بالعالم ١٢٣٤ ۱۲۳",
    "שלום עולם \u200fRTL\u200e LTR \u202eevil\u202c",
    "हिन्दी में पाठ क्षि १२३",
    "Привет, мир! ЁЖИК ёжик",
    "Ελληνικά ΑΣ ας",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪 ❤️ 😀",
    "🧑🏿‍🚀🧑🏻‍🚒1️⃣#️⃣",
    "𝕬𝖇𝖈 𝟙𝟚𝟛 𠜎𠜱 \U0010ffff",
    "½ ⅓ ² ³ Ⅳ ① ៣ 𝟘 ٣",
    "1234567890 3.14159 1,000,000 0x1F 1e-10 2024-02-29",
    "def f(x: int) -> int:\n    return x ** 2  # ok\n",
    "\tif (a && b) { c++; }\r\n\t\treturn;\r\n",
    "SELECT * FROM t WHERE a='b'; -- c",
    '<html><body class="x">&amp;&lt;</body></html>',
    "https://example.com/a?b=c&d=%20#e user@host.org",
    '{"key": [1, 2.5, null, true], "é": "\\u00e9"}',
    "a" * 70,
    "ab" * 40,
    "=" * 40 + "-" * 33 + "#" * 17,
    " ",
    "  ",
    "       seven leading and trailing       ",
    "a  b   c    d     e",
    " " * 60 + "x",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    " \n \n  \n",
    "\t\t\tx\t",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u2029g\u0085h",
    "\x00\x01\x02\x07\x08\x0b\x0c\x0e\x1b[31m\x7f\x80\x9f",
    "\ufeffBOM \ufffd replacement \ufffe \uffff",
    "\u0301alone \u200d\u200d \ufe0f",
    "soft\u00adhyphen zero\u2060width",
    "ﬁ ﬂ ﬃ ǆ ß ẞ İ ı",
    "① ㍿ ㌔ ｶﾞ ＦＵＬＬ",
    "…—–‘’“”«»¿¡•·†‡",
    "$€£¥₿ %‰ ±×÷≠≤≥ ∑∫√∞",
    "<s>hello</s>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_end|>y <|im_end|> z<|im_end|>",
    "<|im_start|",
    "<|im_start|><|im_start|>",
    "< s > <S> <s",
    "<tool_call>{}</tool_call> <|fim pad|>x",
    "▁ ▁▁ a▁b",
    "<0x0A> <0xFF> <0xGG>",
    "Ġ Ċ Ġthe ĠĠ",
    "",
]


def nasty_strings() -> list[str]:
    """A few hundred: each part alone, with spaces and newlines around, and glued to its neighbours."""
    out = list(PARTS)
    out += [" " + p for p in PARTS] + [p + " " for p in PARTS] + [p + "\n" for p in PARTS] + ["7" + p for p in PARTS]
    out += [a + b for a, b in itertools.pairwise(PARTS)]
    out += [b + " " + a for a, b in zip(PARTS, PARTS[7:])]
    return out


def corpus() -> list[str]:
    return [p for p in PARTS if "\x00" not in p and p not in ("<s>hello</s>",)] * 3


# As the models' published tokenizer.json files write them.
HF_SPLITS: dict[str, Any] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": lambda: _regex_split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama-bpe": lambda: _regex_split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def _regex_split(regex: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_byte_level(pre: str, vocab_size: int = 700) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer that splits as ``pre`` does."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = HF_SPLITS[pre]()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in USER_DEFINED])
    if pre == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def gguf_metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes for a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [3 if t in SPECIAL else 4 if t in USER_DEFINED else 1 for t in tokens]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": ("ARRAY[INT32]", kinds),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
    }


def train_sentencepiece(*, add_prefix: bool, vocab_size: int = 900) -> Any:
    """A SentencePiece BPE model with byte fallback (a SentencePieceProcessor)."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        add_dummy_prefix=add_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<tool_call>"],
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: Any, *, add_prefix: bool) -> dict[str, Any]:
    """What a converter writes for a SentencePiece model."""
    ids = range(processor.get_piece_size())
    user_defined = processor.piece_to_id("<tool_call>")
    kinds = [
        6 if processor.is_byte(i) else 3 if processor.is_control(i) else 2 if processor.is_unknown(i) else 1
        for i in ids
    ]
    kinds[user_defined] = 4
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.token_type": ("ARRAY[INT32]", kinds),
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": add_prefix,
    }


def save_folder(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
