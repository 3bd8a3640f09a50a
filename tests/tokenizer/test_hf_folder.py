"""The files around tokenizer.json: special tokens, further added tokens, end tokens, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.exceptions import FormatError, UnsupportedModel
from octavo.tokenizer import load_tokenizer
from tests.tokenizer.samples import SPECIAL, save_folder, train_byte_level


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    return train_byte_level("gpt-2", 400)


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def test_special_tokens_written_as_objects_or_elsewhere(tmp_path: Path, backend: Tokenizer) -> None:
    save_folder(tmp_path, backend, bos_token=None, eos_token={"__type": "AddedToken", "content": "</s>"})
    write(tmp_path, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, [1])


def test_end_ids_of_generation_config(tmp_path: Path, backend: Tokenizer) -> None:
    """The tokenizer's own first, no repeats; config.json counts only without generation_config.json."""
    save_folder(tmp_path, backend)
    write(tmp_path, "config.json", {"eos_token_id": 7})
    assert load_tokenizer(tmp_path).eos_token_ids == [1, 7]
    write(tmp_path, "generation_config.json", {"eos_token_id": [3, 1, 9]})
    assert load_tokenizer(tmp_path).eos_token_ids == [1, 3, 9]
    write(tmp_path, "generation_config.json", {"eos_token_id": "x"})
    with pytest.raises(FormatError, match="neither an id nor a list"):
        load_tokenizer(tmp_path)


def test_tokens_that_only_the_config_knows(tmp_path: Path, backend: Tokenizer) -> None:
    size = backend.get_vocab_size()
    added = {str(size): {"content": "<new>", "special": True}, str(size + 1): {"content": "<more>", "special": False}}
    save_folder(tmp_path, backend, added_tokens_decoder=added)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<new><more>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<more>"
    assert tokenizer.vocab_size == size + 2
    save_folder(tmp_path, backend, added_tokens_decoder={str(size + 5): {"content": "<new>"}})
    with pytest.raises(FormatError, match="should have id"):
        load_tokenizer(tmp_path)
    save_folder(tmp_path, backend, added_tokens_decoder={"x": {}})
    with pytest.raises(FormatError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_additional_special_tokens(tmp_path: Path, backend: Tokenizer, key: str) -> None:
    """As in transformers, they are skipped although tokenizer.json has them as plain added tokens."""
    save_folder(tmp_path, backend, **{key: ["<tool_call>"]})
    tokenizer = load_tokenizer(tmp_path)
    (tool,) = tokenizer.encode("<tool_call>")
    assert tool in tokenizer.special_token_ids
    assert len(tokenizer.special_token_ids) == len(SPECIAL) + 1


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_of_the_wrong_shape(tmp_path: Path, backend: Tokenizer, file: str, key: str) -> None:
    save_folder(tmp_path, backend)
    write(tmp_path, file, {key: 2})
    with pytest.raises(FormatError, match=f"{file}.*{key}.*neither a list nor an object"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, backend: Tokenizer) -> None:
    copy = Tokenizer.from_str(backend.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    save_folder(tmp_path, copy)
    assert load_tokenizer(tmp_path).encode("a b c d e f g") == backend.encode("a b c d e f g").ids


def test_chat_templates(tmp_path: Path, backend: Tokenizer) -> None:
    """A file of its own wins over tokenizer_config.json, which may hold one or several by name."""
    save_folder(tmp_path, backend)
    assert load_tokenizer(tmp_path).chat_template is None
    write(tmp_path, "chat_template.json", {"chat_template": "from json"})
    assert load_tokenizer(tmp_path).chat_template == "from json"
    save_folder(tmp_path, backend, chat_template="from config")
    assert load_tokenizer(tmp_path).chat_template == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save_folder(tmp_path, backend, chat_template=named)
    assert load_tokenizer(tmp_path).apply_chat_template([]) == "plain"
    assert load_tokenizer(tmp_path).apply_chat_template([], tools=[{}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load_tokenizer(tmp_path).chat_template == "from jinja"
    save_folder(tmp_path, backend, chat_template=[{"name": "x"}])
    with pytest.raises(FormatError, match="chat_template"):
        load_tokenizer(tmp_path)


def test_sentencepiece_style_decoders(tmp_path: Path) -> None:
    """As Llama 2 (prefix stripped) and Gemma (not) write them; equal to the library on whole characters."""
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5, "\u0301": 6, "<0xFF>": 7}
    vocab |= {f"<0x{byte:02X}>": 8 + i for i, byte in enumerate("é😀".encode())}
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    cases = {
        True: decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)]),
        False: decoders.Sequence(plain),
    }
    for strips, decoder in cases.items():
        model = models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
        library = Tokenizer(model)
        library.normalizer = normalizers.Replace(" ", "▁")
        library.decoder = decoder
        library.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("<unk>", normalized=False)])
        ours = load_tokenizer(save_folder(tmp_path, library))
        assert ours.strips_leading_space is strips
        for text in (" a b", "a  b", "  a", "aéa", "é😀", "a a"):
            ids = library.encode(text).ids
            assert ours.encode(text) == ids
            assert ours.decode(ids) == library.decode(ids)
            assert ours.decode([1, *ids], skip_special_tokens=False) == library.decode(
                [1, *ids], skip_special_tokens=False
            )


def test_metaspace_decoder(tmp_path: Path) -> None:
    library = Tokenizer(models.BPE({"▁a": 0, "▁": 1, "a": 2}, [("▁", "a")]))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    ours = load_tokenizer(save_folder(tmp_path, library, bos_token=None, eos_token=None))
    ids = library.encode("a a a").ids
    assert ours.strips_leading_space
    assert ours.decode(ids) == library.decode(ids) == "a a a"
    assert b"".join(map(ours.token_bytes, ids)) == b" a a a"


def test_no_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
