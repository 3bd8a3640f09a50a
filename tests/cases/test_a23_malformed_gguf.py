"""A23: files whose numbers lie. Each is refused with file, place and reason, before memory is spent on it."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config import ModelConfig
from octavo.exceptions import FormatError, ModelError
from octavo.model_loader.load import inspect_model
from octavo.tokenizer import load_tokenizer
from tests.formats.gguf_writer import pack_entry, pack_string, pack_value
from tests.fuzz.test_files import tiny_gguf, use

GOOD = tiny_gguf("llama")
ENTRY = "blk.0.attn_q.weight"


def put(at: int, code: str, *values: int) -> Callable[[bytes], bytes]:
    """Numbers overwritten at byte ``at``."""

    def change(data: bytes) -> bytes:
        raw = struct.pack("<" + code, *values)
        return data[:at] + raw + data[at + len(raw) :]

    return change


def entry(shift: int, code: str, *values: int) -> Callable[[bytes], bytes]:
    """Numbers overwritten ``shift`` bytes after the name of a tensor in the directory."""
    return put(GOOD.index(pack_string(ENTRY)) + len(pack_string(ENTRY)) + shift, code, *values)


def swapped(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert GOOD.count(old) == 1
    return lambda data: data.replace(old, new)


def added(key: str, value: bytes) -> Callable[[bytes], bytes]:
    """One more metadata pair, before the others."""
    pairs = struct.unpack_from("<Q", GOOD, 16)[0]
    return lambda data: data[:16] + struct.pack("<Q", pairs + 1) + pack_string(key) + value + data[24:]


def value(key: str, kind: str, old: object, new_kind: str, new: object) -> Callable[[bytes], bytes]:
    return swapped(pack_string(key) + pack_value(kind, old), pack_string(key) + pack_value(new_kind, new))


SCORES = pack_string("tokenizer.ggml.scores") + struct.pack("<II", 9, 6)
CASES: dict[str, Callable[[bytes], bytes]] = {
    "2^60 tensors": put(8, "Q", 2**60),
    "2^63 pairs": put(16, "Q", 2**63),
    "a string of 2^63 bytes": added("k", struct.pack("<IQ", 8, 2**63)),
    "an array of 2^62 strings": added("k", struct.pack("<IIQ", 9, 8, 2**62)),
    "arrays in arrays": added("k", struct.pack("<IIQIQ", 9, 9, 1, 4, 0)),
    "5000 dimensions": entry(0, "I", 5000),
    "dimensions [1, 2^42 + 1]": entry(4, "QQ", 1, 2**42 + 1),
    "dimensions whose product wraps": entry(4, "QQ", 2**32, 2**32),
    "an unknown type": entry(20, "I", 1234),
    "an offset beyond the end": entry(24, "Q", 2**40),
    "an offset that is not aligned": entry(24, "Q", 4),
    "an offset in another tensor": entry(24, "Q", 32),
    "alignment 0": added("general.alignment", pack_value("UINT32", 0)),
    "alignment 3": added("general.alignment", pack_value("UINT32", 3)),
    "alignment of another type": added("general.alignment", pack_value("INT32", 32)),
    "scores of another type": swapped(SCORES, SCORES[:-4] + struct.pack("<I", 0)),
    "100000 layers": value("llama.block_count", "UINT32", 1, "UINT32", 100_000),
    "no heads": value("llama.attention.head_count", "UINT32", 2, "UINT32", 0),
    "a key twice": added("general.architecture", pack_value("STRING", "llama")),
    "a tensor twice": swapped(pack_string("blk.0.attn_k.weight"), pack_string("blk.0.attn_v.weight")),
    "an empty directory": put(8, "Q", 0),
    **{f"the first {part} of 8 parts": lambda data, part=part: data[: len(data) * part // 8] for part in range(8)},  # type: ignore[misc]
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_lies(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(CASES[case](GOOD))
    tracemalloc.start()
    with pytest.raises(ModelError) as caught:
        inspect_model(str(path), ModelConfig(model=str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000
    assert str(path) in str(caught.value)
    if isinstance(caught.value, FormatError):
        assert caught.value.key is not None or caught.value.offset is not None


def test_a_vocabulary_that_would_take_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    length = 1_000_002  # as much more as keeps the data aligned
    path.write_bytes(swapped(pack_string("x7"), pack_string("x" * length))(GOOD))
    with pytest.raises(FormatError, match="too long"):
        load_tokenizer(str(path))


def test_the_honest_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    use(path)


def test_the_command_line_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(CASES["an offset that is not aligned"](GOOD))
    assert main(["plan", str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"octavo plan: {path}, key '{ENTRY}', offset ")
    assert told.count("\n") == 1


def test_directory_entries_are_where_the_cases_think() -> None:
    """name, dimensions, their sizes, type, offset: else the cases above would damage something else."""
    written = pack_entry(ENTRY, (32, 32), 0, 0)[: len(pack_string(ENTRY)) + 24]
    assert GOOD.count(written) == 1
