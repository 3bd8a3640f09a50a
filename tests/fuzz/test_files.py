"""Damaged model files: an error that octavo raises on purpose, or a model; no crash, and little memory."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.config import ModelConfig
from octavo.exceptions import FormatError, OctavoError
from octavo.model_loader.load import inspect_model, load_model
from octavo.tokenizer import load_tokenizer
from tests.engine.tiny_llama import write_model, write_tokenizer
from tests.formats.gguf_writer import gguf_bytes
from tests.fuzz.mutation import corpus, damaged, quick, twisted

HIDDEN, VOCAB = 32, 300
MOST_BYTES = 50_000_000  # of memory, whatever a file says of itself
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def tiny_gguf(kind: str) -> bytes:
    """A complete model of one layer with a byte-level or a SentencePiece vocabulary."""
    if kind == "gpt2":
        tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "o!"]
        tokens += [f"<{i}>" for i in range(VOCAB - len(tokens))]
        types = [3, 3] + [1] * (VOCAB - 2)
        more: dict[str, Any] = {"tokenizer.ggml.merges": ["h e", "l l", "he ll", "o !"]}
    else:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁ab"]
        tokens += [f"x{i}" for i in range(VOCAB - len(tokens))]
        types = [2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259)
        more = {"tokenizer.ggml.scores": [-float(i) for i in range(VOCAB)]}
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": ("ARRAY[INT32]", types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        **more,
    }
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}": (HIDDEN, HIDDEN) for name in square}
    shapes |= {f"blk.0.{name}": (HIDDEN // 2, HIDDEN) for name in ("attn_k", "attn_v")}
    shapes |= {f"blk.0.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    return gguf_bytes(
        metadata,
        {f"{name}.weight": (s, "F32", np.full(s, 0.5, np.float32).tobytes()) for name, s in shapes.items()},
    )


GGUF = [tiny_gguf("gpt2"), tiny_gguf("llama")]


def use(path: Path) -> None:
    """All that a start reads of a model."""
    config = ModelConfig(model=str(path))
    inspect_model(str(path), config)
    loaded = load_model(config)
    for name in loaded.weights:
        _ = loaded.weights[name]
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer.decode(tokenizer.encode("hello ab 漢")), str)
    if tokenizer.chat_template is not None:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def survives(path: Path) -> None:
    """``use`` works, or fails on purpose."""
    tracemalloc.start()
    told = "nothing"
    try:
        use(path)
    except OctavoError as error:
        told = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert 0 < len(told) < 3000


def gguf_file(folder: Path, content: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", GGUF, ids=["gpt2", "llama"])
def test_the_seeds_are_models(tmp_path: Path, content: bytes) -> None:
    use(gguf_file(tmp_path, content))


@pytest.mark.parametrize("content", corpus("gguf"), ids=range(len(corpus("gguf"))))
def test_what_once_failed(tmp_path: Path, content: bytes) -> None:
    survives(gguf_file(tmp_path, content))


@quick
@given(content=damaged(GGUF, focus=10_000))
def test_gguf(tmp_path: Path, content: bytes) -> None:
    survives(gguf_file(tmp_path, content))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    write_tokenizer(path)
    use(path)
    return path


def with_file(model: Path, folder: Path, name: str, content: bytes) -> Path:
    """The model with one file replaced."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / name).unlink()
    (copy / name).write_bytes(content)
    return copy


@quick
@given(data=st.data())
def test_safetensors(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = data.draw(damaged([(model / "model.safetensors").read_bytes()], focus=2000))
    survives(with_file(model, tmp_path, "model.safetensors", content))


@pytest.mark.parametrize("content", corpus("tokenizer.json"), ids=range(len(corpus("tokenizer.json"))))
def test_tokenizers_that_once_failed(model: Path, tmp_path: Path, content: bytes) -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        use(with_file(model, tmp_path, "tokenizer.json", content))


@pytest.mark.parametrize("name", JSON_FILES)
@quick
@given(data=st.data())
def test_json_files(model: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    seeds = [(model / name).read_bytes()]
    content = data.draw(twisted(seeds) | damaged(seeds))
    survives(with_file(model, tmp_path, name, content))
