"""Tokenizers out of GGUF metadata: SentencePiece against its own library, flags, end tokens, and wrong metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.exceptions import FormatError, ModelNotFound, UnsupportedModel
from octavo.tokenizer import Tokenizer, load_tokenizer
from tests.formats.gguf_writer import write_gguf
from tests.tokenizer.samples import (
    SPECIAL,
    gguf_metadata,
    nasty_strings,
    sentencepiece_metadata,
    train_byte_level,
    train_sentencepiece,
)

PLAIN = {"add_special_tokens": False}


@pytest.fixture(scope="module")
def smollm() -> dict[str, Any]:
    return gguf_metadata(train_byte_level("smollm", 400), "smollm")


def loaded(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(write_gguf(folder / "m.gguf", metadata))


@pytest.mark.parametrize("add_prefix", [True, False])
def test_equal_to_sentencepiece(tmp_path: Path, add_prefix: bool) -> None:
    """Ids and text on strings without special tokens, which the library does not look for in text."""
    theirs = train_sentencepiece(add_prefix=add_prefix)
    ours = loaded(tmp_path, sentencepiece_metadata(theirs, add_prefix=add_prefix))
    texts = [t for t in nasty_strings() if not any(s in t for s in (*SPECIAL, "<tool_call>", "<0x", "▁"))]
    assert len(texts) > 300
    for text in texts:
        expected = theirs.encode(text)
        assert ours.encode(text, **PLAIN) == expected, text
        assert ours.encode(text) == [theirs.bos_id(), *expected]
        assert ours.decode(expected) == theirs.decode(expected) == text


def test_sentencepiece_special_tokens(tmp_path: Path) -> None:
    theirs = train_sentencepiece(add_prefix=False)
    ours = loaded(tmp_path, sentencepiece_metadata(theirs, add_prefix=False))
    end, tool = theirs.piece_to_id("<|im_end|>"), theirs.piece_to_id("<tool_call>")
    a, b = theirs.encode("a"), theirs.encode("b")
    assert ours.encode("a<|im_end|>b<tool_call>", **PLAIN) == [*a, end, *b, tool]
    assert ours.decode([*a, end, *b, tool]) == "ab<tool_call>"
    assert ours.decode([*a, end, *b], skip_special_tokens=False) == "a<|im_end|>b"
    assert ours.eos_token_ids == [theirs.eos_id(), end]
    assert ours.special_token_ids == {theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), end}
    assert ours.token_bytes(theirs.piece_to_id("<0x0A>")) == b"\n"


def test_sentencepiece_bytes_that_are_no_character(tmp_path: Path) -> None:
    """The good characters of a run stay good; only the bad byte is replaced."""
    theirs = train_sentencepiece(add_prefix=False)
    ours = loaded(tmp_path, sentencepiece_metadata(theirs, add_prefix=False))
    run = [theirs.piece_to_id(f"<0x{byte:02X}>") for byte in [*"😀".encode(), 0xFF, *"é".encode()]]
    assert ours.decode(run) == "😀\ufffdé"


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, ["<s>"], []),
        ({"add_eos_token": True}, [], ["</s>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>"], ["</s>"]),
    ],
)
def test_bos_and_eos_flags(
    tmp_path: Path, smollm: dict[str, Any], flags: dict[str, bool], before: list[str], after: list[str]
) -> None:
    tokenizer = loaded(tmp_path, smollm | {f"tokenizer.ggml.{key}": value for key, value in flags.items()})
    ids = tokenizer.encode("Hello")
    plain = tokenizer.encode("Hello", **PLAIN)
    assert [tokenizer.token_string(i) for i in ids] == [*before, *map(tokenizer.token_string, plain), *after]


def test_llama3_adds_bos_where_the_file_does_not_say(tmp_path: Path) -> None:
    metadata = gguf_metadata(train_byte_level("llama-bpe", 400), "llama-bpe")
    assert loaded(tmp_path, metadata).encode("")[:1] == [0]
    assert loaded(tmp_path, metadata | {"tokenizer.ggml.add_bos_token": False}).encode("") == []


def test_end_tokens(tmp_path: Path, smollm: dict[str, Any]) -> None:
    """EOS, EOT, and control tokens known to end a turn; the same text as an ordinary token is none."""
    tokens = smollm["tokenizer.ggml.tokens"]
    end, eos = tokens.index("<|im_end|>"), tokens.index("</s>")
    assert loaded(tmp_path, smollm).eos_token_ids == [eos, end]
    assert loaded(tmp_path, smollm | {"tokenizer.ggml.eot_token_id": 9}).eos_token_ids == [eos, 9, end]
    kinds = [1 if i == end else kind for i, kind in enumerate(smollm["tokenizer.ggml.token_type"][1])]
    ordinary = smollm | {"tokenizer.ggml.token_type": ("ARRAY[INT32]", kinds)}
    assert loaded(tmp_path, ordinary).eos_token_ids == [eos]


def test_no_pre_tokenizer_is_gpt2_with_a_warning(
    tmp_path: Path, smollm: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    without = {key: value for key, value in smollm.items() if key != "tokenizer.ggml.pre"}
    gpt2 = loaded(tmp_path, smollm | {"tokenizer.ggml.pre": "gpt-2"}).encode("a 1234")
    assert loaded(tmp_path, without).encode("a 1234") == gpt2
    assert "split as for GPT-2" in caplog.text


def test_chat_templates(tmp_path: Path, smollm: dict[str, Any]) -> None:
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = loaded(tmp_path, smollm | named)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template([], chat_template="{{ bos_token }}!") == "<s>!"
    assert tokenizer.apply_chat_template([], chat_template="{{ messages|length }}", self=1) == "0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.tokens": []}, "no tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
        ({"tokenizer.ggml.token_type": ("ARRAY[INT32]", [1, 1])}, "2 values for"),
        ({"tokenizer.ggml.merges": []}, "no merges"),
        ({"tokenizer.ggml.merges": ["Ġ nosuchtoken"]}, "out of vocabulary"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "merges"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "not the id of one of"),
        ({"tokenizer.ggml.padding_token_id": "x"}, "not the id of one of"),
    ],
)
def test_wrong_metadata(tmp_path: Path, smollm: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        loaded(tmp_path, smollm | change)
    assert caught.value.key in change


def test_scores_must_match_the_tokens(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(train_sentencepiece(add_prefix=False), add_prefix=False)
    with pytest.raises(FormatError, match="3 values for 900 tokens"):
        loaded(tmp_path, metadata | {"tokenizer.ggml.scores": [0.0, 1.0, 2.0]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.pre": "nobody"}, "'nobody' is not known"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
    ],
)
def test_unsupported(tmp_path: Path, smollm: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        loaded(tmp_path, smollm | change)


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_tokenizer(tmp_path / "none.gguf")
