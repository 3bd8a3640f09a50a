"""Byte-level BPE: from GGUF and from a folder, against transformers on nasty strings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.tokenizer.byte_level import BYTE_OF
from tests.formats.gguf_writer import write_gguf
from tests.tokenizer.samples import HF_SPLITS, SPECIAL, gguf_metadata, nasty_strings, save_folder, train_byte_level

PRES = sorted(HF_SPLITS)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer, Any]]:
    """For each split: ours from GGUF, ours from the folder, and transformers' from the folder."""
    from transformers import PreTrainedTokenizerFast

    out = {}
    for pre in PRES:
        folder = tmp_path_factory.mktemp(pre)
        backend = train_byte_level(pre)
        gguf = load_tokenizer(write_gguf(folder / "m.gguf", gguf_metadata(backend, pre)))
        save_folder(folder, backend)
        theirs = PreTrainedTokenizerFast.from_pretrained(folder, clean_up_tokenization_spaces=False)
        out[pre] = (gguf, load_tokenizer(folder), theirs)
    return out


@pytest.mark.parametrize("pre", PRES)
def test_equal_to_transformers(trio: dict[str, tuple[Tokenizer, Tokenizer, Any]], pre: str) -> None:
    from_gguf, from_folder, theirs = trio[pre]
    for text in nasty_strings():
        for add in (True, False):
            expected = theirs.encode(text, add_special_tokens=add)
            if add and expected[:2] == [0, 0]:
                expected = expected[1:]  # a text that begins with BOS gets no second one: the one deviation
            assert from_gguf.encode(text, add_special_tokens=add) == expected, text
            assert from_folder.encode(text, add_special_tokens=add) == expected, text
        for skip in (True, False):
            shown = theirs.decode(expected, skip_special_tokens=skip)
            assert from_gguf.decode(expected, skip_special_tokens=skip) == shown
            assert from_folder.decode(expected, skip_special_tokens=skip) == shown


@pytest.mark.parametrize("pre", PRES)
def test_facts_agree(trio: dict[str, tuple[Tokenizer, Tokenizer, Any]], pre: str) -> None:
    for ours in trio[pre][:2]:
        theirs = trio[pre][2]
        assert ours.vocab_size == len(theirs)
        assert (ours.bos_token_id, ours.eos_token_ids[0]) == (theirs.bos_token_id, theirs.eos_token_id)
        assert {ours.token_string(i) for i in ours.special_token_ids} == set(SPECIAL)
        assert [ours.token_string(i) for i in range(len(theirs))] == theirs.convert_ids_to_tokens(range(len(theirs)))


@pytest.mark.parametrize("pre", PRES)
def test_round_trip_and_bytes(trio: dict[str, tuple[Tokenizer, Tokenizer, Any]], pre: str) -> None:
    """Byte-level tokenizers lose nothing (but what NFC composes), and token_bytes are the text's bytes."""
    import unicodedata

    ours = trio[pre][0]
    for text in nasty_strings():
        kept = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == kept
        assert b"".join(map(ours.token_bytes, ids)).decode() == kept


def test_bos_is_not_added_twice(trio: dict[str, tuple[Tokenizer, Tokenizer, Any]]) -> None:
    """A10: a rendered chat that begins with BOS may be encoded either way."""
    for ours in trio["llama-bpe"][:2]:
        bos = ours.bos_token_id
        plain = ours.encode("Hello", add_special_tokens=False)
        assert ours.encode("Hello") == ours.encode("<s>Hello") == [bos, *plain]
        assert ours.encode("<s>Hello", add_special_tokens=False) == [bos, *plain]
        assert ours.encode("<s><s>Hello", add_special_tokens=False) == [bos, bos, *plain]


def test_ids_beyond_the_vocabulary(trio: dict[str, tuple[Tokenizer, Tokenizer, Any]]) -> None:
    for ours in trio["smollm"][:2]:
        ids = ours.encode("Hello")
        beyond = [ours.vocab_size, 2**31, 2**63, -1]
        assert ours.decode([beyond[0], *ids, *beyond]) == "Hello"
        assert [ours.token_bytes(i) for i in beyond] == [b""] * 4
        assert [ours.token_string(i) for i in beyond] == [""] * 4


def test_lone_surrogates_are_refused(trio: dict[str, tuple[Tokenizer, Tokenizer, Any]]) -> None:
    from octavo.exceptions import ValidationError

    with pytest.raises(ValidationError, match="surrogate"):
        trio["smollm"][0].encode("a\ud800b")


def test_alphabet_covers_every_byte() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(BYTE_OF.values()) == list(range(256))
    assert set(BYTE_OF) == set(ByteLevel.alphabet())


def test_threads(trio: dict[str, tuple[Tokenizer, Tokenizer, Any]]) -> None:
    ours = trio["qwen2"][0]
    texts = nasty_strings()
    alone = [ours.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ours.encode, texts)) == alone
        assert list(pool.map(ours.decode, alone)) == [ours.decode(ids) for ids in alone]


def test_the_real_model(smollm2_path: str) -> None:
    """SmolLM2's GGUF against its published pipeline (single digits, then GPT-2's byte level), built by hand."""
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    from octavo.formats.gguf import GGUFFile

    ours = load_tokenizer(smollm2_path)
    metadata = GGUFFile(smollm2_path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(dict(zip(tokens, range(len(tokens)))), merges))
    backend.pre_tokenizer = HF_SPLITS["smollm"]()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    for text in nasty_strings():
        ids = ours.encode(text)
        assert ids == backend.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (49152, 1, [2, 0])
    assert ours.encode("The capital of France is 1234<|im_end|>") == [504, 3575, 282, 4649, 314, 216, 33, 34, 35, 36, 2]


def test_the_real_model_against_transformers(smollm2_path: str) -> None:
    """transformers builds a tokenizer from the same file; where it splits digits as we do, the ids are equal."""
    from transformers import AutoTokenizer

    path = Path(smollm2_path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(smollm2_path)
    texts = [text for text in nasty_strings() if not any(char.isnumeric() for char in text)]
    assert len(texts) > 150
    for text in texts:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_import_is_light() -> None:
    import json
    import subprocess
    import sys

    code = "import octavo.tokenizer, json, sys; print(json.dumps([m for m in sys.modules]))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"tokenizers", "jinja2", "numpy"} & set(loaded)
