"""The GGUF reader: honest files, every malformed file of case A23, and bytes flipped at random."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.exceptions import FormatError, ModelError, ModelNotFound, UnsupportedModel
from octavo.formats.gguf import TENSOR_TYPES, GGUFFile
from tests.formats.gguf_writer import TYPE_NUMBERS, gguf_bytes, pack_entry, pack_string, pack_value, write_gguf

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.rope.freq_base": 10000.0,
    "a.bool": True,
    "an.int64": ("INT64", -(2**40)),
    "a.float64": ("FLOAT64", 0.1),
    "tokenizer.ggml.tokens": ["a", "é", "😀", ""],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.5],
    "tokenizer.ggml.token_type": ("ARRAY[INT32]", [1, 1, 3, 6]),
    "flags": [True, False],
}


def tensors() -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    rng = np.random.default_rng(0)
    out: dict[str, tuple[tuple[int, ...], str, bytes]] = {}
    for name, block, nbytes in TENSOR_TYPES.values():
        rows, columns = 3, 2 * block
        out[f"blk.0.{name}"] = ((rows, columns), name, rng.bytes(rows * 2 * nbytes))
    return out


HONEST = gguf_bytes(METADATA, tensors())


def head(tensor_count: int, kv_count: int, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, kv_count)


def with_tensors(*entries: bytes, data: int = 256, pairs: bytes = b"", kv_count: int = 0) -> bytes:
    """A file with raw directory entries and ``data`` zero bytes of tensor data."""
    body = head(len(entries), kv_count) + pairs + b"".join(entries)
    return body + b"\0" * (-len(body) % 32 + data)


def with_pair(key: str, value: bytes) -> bytes:
    return head(0, 1) + pack_string(key) + value + b"\0" * 64


def entry(name: str = "t", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return pack_entry(name, dims, kind, offset)


def test_reads_what_was_written(tmp_path: Path) -> None:
    gguf = GGUFFile(write_gguf(tmp_path / "m.gguf", METADATA, tensors()))
    plain = {key: value[1] if isinstance(value, tuple) else value for key, value in METADATA.items()}
    assert gguf.metadata == plain
    assert gguf.value_types["tokenizer.ggml.tokens"] == "ARRAY[STRING]"
    assert list(gguf.tensors) == list(tensors())
    for name, (shape, type_name, raw) in tensors().items():
        tensor = gguf.tensors[name]
        assert (tensor.shape, tensor.type, tensor.data.tobytes()) == (shape, type_name, raw)
        assert tensor.data.dtype == np.uint8
        assert not tensor.data.flags.owndata


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_and_version(tmp_path: Path, alignment: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors(), version=2, alignment=alignment)
    for name, (_, _, raw) in tensors().items():
        assert GGUFFile(path).tensors[name].data.tobytes() == raw


def test_data_outlives_the_file_object(tmp_path: Path) -> None:
    data = GGUFFile(write_gguf(tmp_path / "m.gguf", {}, tensors())).tensors["blk.0.F32"].data
    assert data.tobytes() == tensors()["blk.0.F32"][2]


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "too few"),
    "not gguf": (b"GGML" + HONEST[4:], "not a GGUF"),
    "tensor count 2^60": (head(2**60, 0) + b"\0" * 64, "at most"),
    "tensor count 2^64 - 1": (head(2**64 - 1, 0) + b"\0" * 64, "at most"),
    "more tensors than the file holds": (head(9, 0) + b"\0" * 64, "cannot fit"),
    "pair count huge": (head(0, 2**61) + b"\0" * 64, "at most"),
    "pairs that do not fit": (head(0, 9) + b"\0" * 64, "cannot fit"),
    "more pairs than the file holds": (head(0, 4) + b"\0" * 64, "empty metadata key"),
    "string of 2^63": (with_pair("k", struct.pack("<IQ", 8, 2**63)), "are left"),
    "string of 2^64 - 1": (with_pair("k", struct.pack("<IQ", 8, 2**64 - 1)), "are left"),
    "key of 2^63": (head(0, 1) + struct.pack("<Q", 2**63) + b"\0" * 64, "at most"),
    "key not utf-8": (head(0, 1) + pack_string(b"\xff\xfe") + b"\0" * 64, "UTF-8"),
    "string not utf-8": (with_pair("k", struct.pack("<I", 8) + pack_string(b"\xc3")), "UTF-8"),
    "token not utf-8": (with_pair("k", struct.pack("<IIQ", 9, 8, 1) + pack_string(b"\xc3")), "UTF-8"),
    "array of 2^62 numbers": (with_pair("k", struct.pack("<IIQ", 9, 6, 2**62)), "in all"),
    "array of 2^61 strings": (with_pair("k", struct.pack("<IIQ", 9, 8, 2**61)), "in all"),
    "array of 2^20 numbers": (with_pair("k", struct.pack("<IIQ", 9, 6, 2**20)), "are left"),
    "array of 2^20 strings": (with_pair("k", struct.pack("<IIQ", 9, 8, 2**20)), "are left"),
    "arrays too long in all": (
        head(0, 2)
        + pack_string("a")
        + struct.pack("<IIQ", 9, 0, 2**21)
        + b"\0" * 2**21
        + pack_string("b")
        + struct.pack("<IIQ", 9, 0, 2**21 + 1)
        + b"\0" * (2**21 + 1),
        "in all",
    ),
    "string in array of 2^63": (with_pair("k", struct.pack("<IIQQ", 9, 8, 2, 2**63)), "past the end"),
    "last string in array of 2^63": (with_pair("k", struct.pack("<IIQQ", 9, 8, 1, 2**63)), "past the end"),
    "strings whose lengths wrap to zero": (
        with_pair("k", struct.pack("<IIQQQ", 9, 8, 2, 2**64 - 8, 8)),
        "past the end",
    ),
    "array of arrays": (with_pair("k", struct.pack("<IIQIQ", 9, 9, 1, 4, 0)), "arrays of arrays"),
    "array of unknown": (with_pair("k", struct.pack("<IIQ", 9, 77, 1)), "unknown element type"),
    "unknown value type": (with_pair("k", struct.pack("<I", 13)), "unknown value type"),
    "bool of 2": (with_pair("k", struct.pack("<IB", 7, 2)), "neither 0 nor 1"),
    "key twice": (head(0, 2) + (pack_string("k") + pack_value("UINT8", 1)) * 2 + b"\0" * 64, "twice"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}, {}), "power of two"),
    "alignment 3": (gguf_bytes({"general.alignment": 3}, {}), "power of two"),
    "alignment 2^31": (gguf_bytes({"general.alignment": 2**31}, {}), "power of two"),
    "alignment INT32": (gguf_bytes({"general.alignment": ("INT32", 32)}, {}), "INT32, must be UINT32"),
    "scores UINT8": (gguf_bytes({"tokenizer.ggml.scores": ("ARRAY[UINT8]", [1])}, {}), "must be ARRAY\\[FLOAT32\\]"),
    "tokens INT32": (gguf_bytes({"tokenizer.ggml.tokens": ("ARRAY[INT32]", [1])}, {}), "must be ARRAY\\[STRING\\]"),
    "token types FLOAT32": (gguf_bytes({"tokenizer.ggml.token_type": [1.0]}, {}), "must be ARRAY\\[INT32\\]"),
    "merges a string": (gguf_bytes({"tokenizer.ggml.merges": "a b"}, {}), "must be ARRAY\\[STRING\\]"),
    "eos FLOAT32": (gguf_bytes({"tokenizer.ggml.eos_token_id": 2.0}, {}), "must be UINT32"),
    "architecture INT": (gguf_bytes({"general.architecture": 1}, {}), "must be STRING"),
    "block_count 100000": (gguf_bytes({**METADATA, "llama.block_count": 100_000}, tensors()), "layers"),
    "block_count a string": (gguf_bytes({**METADATA, "llama.block_count": "1"}, tensors()), "layers"),
    "no dimensions": (with_tensors(entry(dims=())), "dimensions"),
    "5000 dimensions": (with_tensors(pack_string("t") + struct.pack("<I", 5000)), "5000 dimensions"),
    "dims [1, 2^42 + 1]": (with_tensors(entry(dims=(1, 2**42 + 1))), "leave the file"),
    "dims that wrap to 0": (with_tensors(entry(dims=(2**32, 2**32))), "leave the file"),
    "dims that wrap to 8": (with_tensors(entry(dims=(8, 2**63, 2, 1))), "leave the file"),
    "a dimension of 0": (with_tensors(entry(dims=(8, 0))), "empty"),
    "a row not of whole blocks": (with_tensors(entry(dims=(33,), kind=3)), "multiple"),
    "unknown tensor type": (with_tensors(entry(kind=1234)), "unknown tensor type 1234"),
    "removed tensor type": (with_tensors(entry(kind=4)), "unknown tensor type 4"),
    "offset beyond the end": (with_tensors(entry(offset=4096)), "leave the file"),
    "offset 2^64 - 32": (with_tensors(entry(offset=2**64 - 32)), "leave the file"),
    "data cut short": (with_tensors(entry(dims=(8,)), data=28), "the data ends"),
    "offset unaligned": (with_tensors(entry(offset=4)), "alignment"),
    "overlap": (with_tensors(entry("a", (16,)), entry("b", (8,), offset=32)), "overlaps"),
    "same data twice": (with_tensors(entry("a"), entry("b")), "overlaps"),
    "tensor name twice": (with_tensors(entry("a"), entry("a", offset=32)), "twice"),
    "tensor name too long": (with_tensors(entry("n" * 300)), "at most 255"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    """Each fault is a FormatError that names the file and costs little memory."""
    content, reason = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(FormatError, match=reason) as caught:
        GGUFFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.path == str(path)
    assert caught.value.key is not None or caught.value.offset is not None
    assert peak < 50_000_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b[:4] + struct.pack("<I", 1) + b[8:], "version 1"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "big-endian"),
        (lambda b: with_tensors(entry("t", (256,), TYPE_NUMBERS["Q2_K"])), "'t' has type Q2_K"),
        (lambda b: gguf_bytes({"split.count": ("UINT16", 2)}, {}), "parts"),
    ],
)
def test_well_formed_but_unsupported(tmp_path: Path, change: Callable[[bytes], bytes], reason: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(change(HONEST))
    with pytest.raises(UnsupportedModel, match=reason):
        GGUFFile(path)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelNotFound):
            GGUFFile(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for size in range(len(HONEST)):
        path.write_bytes(HONEST[:size])
        with pytest.raises(FormatError):
            GGUFFile(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.integers(0, len(HONEST) - 1), st.integers(0, 255), min_size=1, max_size=8), st.data())
def test_flipped_bytes(tmp_path: Path, flips: dict[int, int], data: st.DataObject) -> None:
    """Any bytes either parse into tensors that lie in the file, or raise a ModelError; nothing else."""
    content = bytearray(HONEST)
    for position, byte in flips.items():
        content[position if data.draw(st.booleans()) else position % 700] = byte
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    try:
        gguf = GGUFFile(path)
    except ModelError:
        return
    assert sum(tensor.data.nbytes for tensor in gguf.tensors.values()) <= len(content)


def test_equal_to_the_gguf_package(smollm2_path: str) -> None:
    """Metadata, shapes and bytes of the real model, compared with the format's own Python package."""
    import gguf

    theirs, ours = gguf.GGUFReader(smollm2_path), GGUFFile(smollm2_path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(d) for d in reversed(tensor.shape))
        assert mine.type == tensor.tensor_type.name
        assert np.array_equal(mine.data, tensor.data.reshape(-1).view(np.uint8))
