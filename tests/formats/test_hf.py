"""Folders in Hugging Face's layout: JSON files, single and sharded safetensors, and what is wrong with them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from octavo.exceptions import FormatError, ModelNotFound, UnsupportedModel
from octavo.formats.hf import INDEX_FILE, SafetensorsFolder, read_json


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], *, pad: int = 0) -> None:
    """A file written by hand; ``pad`` spaces after the header move the data off its alignment."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


F32 = ("F32", (2, 3), np.arange(6, dtype="<f4").tobytes())
BF16 = ("BF16", (4,), np.array([0x3F80, 0xBF80, 0, 0x7F80], dtype="<u2").tobytes())
EMPTY = ("I64", (0, 5), b"")


def sharded(folder: Path) -> dict[str, str]:
    write_safetensors(folder / "a.safetensors", {"x": F32, "unlisted": F32})
    write_safetensors(folder / "b.safetensors", {"y": BF16})
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("pad", [0, 1])
def test_single_file(tmp_path: Path, pad: int) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": F32, "y": BF16, "z": EMPTY}, pad=pad)
    folder = SafetensorsFolder(tmp_path)
    assert list(folder) == ["x", "y", "z"]
    assert folder["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (folder["y"].dtype, folder.dtype_of("y")) == (np.uint16, "BF16")
    assert folder["y"].tolist() == [0x3F80, 0xBF80, 0, 0x7F80]
    assert folder["z"].shape == folder.shape_of("z") == (0, 5)
    assert all(array.flags.aligned for array in folder.values())
    with pytest.raises(KeyError):
        folder["w"]


def test_equal_to_the_library(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(0)
    arrays = {f"t.{i}": rng.normal(size=(i + 1, 7)).astype(kind) for i, kind in enumerate(["f4", "f2", "f8"])}
    arrays["bytes"] = rng.integers(0, 256, 11).astype(np.uint8)
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = SafetensorsFolder(tmp_path), load_file(tmp_path / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert np.array_equal(ours[name], array)
        assert ours[name].dtype == array.dtype


def test_sharded(tmp_path: Path) -> None:
    sharded(tmp_path)
    folder = SafetensorsFolder(tmp_path)
    assert set(folder) == {"x", "y"}
    assert folder["x"].shape == (2, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"w": "a.safetensors"}, "not in a.safetensors"),
        ({"w": "c.safetensors"}, "1 of 3 shards are missing, first c.safetensors"),
        ({"w": "../a.safetensors"}, "not the name of a file"),
        ({"w": ""}, "not the name of a file"),
        ({"w": 3}, "not the name of a file"),
    ],
)
def test_bad_index(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    write_index(tmp_path, {**sharded(tmp_path), **change})
    with pytest.raises(FormatError, match=reason):
        SafetensorsFolder(tmp_path)


def test_index_without_a_map(tmp_path: Path) -> None:
    sharded(tmp_path)
    for weight_map in ({}, [], None):
        write_index(tmp_path, weight_map)
        with pytest.raises(FormatError, match="weight_map"):
            SafetensorsFolder(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(FormatError, match="2 safetensors files"):
        SafetensorsFolder(tmp_path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": F32, "y": BF16})
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": ("F32", (2**62, 2), b"\0" * 24)},
        {"x": ("F32", (2, 4), b"\0" * 24)},
        {"x": ("Q9", (2, 3), b"\0" * 24)},
    ],
)
def test_sizes_that_contradict(tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(FormatError):
        SafetensorsFolder(tmp_path)


def test_a_type_octavo_lacks(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": ("C64", (1,), b"\0" * 8)})
    with pytest.raises(UnsupportedModel, match="'x' has type C64"):
        SafetensorsFolder(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="pickles"):
        SafetensorsFolder(tmp_path)


def test_read_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1, "é"]}')
    assert read_json(tmp_path, "config.json") == {"a": [1, "é"]}
    assert read_json(tmp_path, "generation_config.json", required=False) == {}
    with pytest.raises(ModelNotFound, match=r"generation_config\.json"):
        read_json(tmp_path, "generation_config.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{", b"[" * 100_000, b'{"a": "\xc3"}'])
def test_read_json_malformed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"config\.json"):
        read_json(tmp_path, "config.json")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(r'{"a": "\ud83d\ude00"}')
    (tmp_path / "b.json").write_text(r'{"a": ["\ud83d"]}')
    assert read_json(tmp_path, "a.json") == {"a": "😀"}
    with pytest.raises(FormatError, match=r"b\.json.*surrogates"):
        read_json(tmp_path, "b.json")
