"""Packed weights on disk: what comes back is equal to the last bit, and whatever is not whole is packed anew."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.cpu import _kernels, packed, packed_cache
from octavo.backends.cpu.packed_cache import PackedCache
from octavo.backends.cpu.weights import PackedWeights
from octavo.config import ModelConfig
from octavo.model_loader import load_model
from octavo.quantization.base import Weight
from tests.formats.gguf_writer import write_gguf

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 70, 2


def write_model(path: Path, seed: int = 0) -> Path:
    """A Qwen2 of Q8_0 matrices (tied embedding, biases), of random bytes."""
    rng = np.random.default_rng(seed)
    kv = HIDDEN // 2
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HIDDEN, HIDDEN),
            "attn_q.bias": (HIDDEN,),
            "attn_k.weight": (kv, HIDDEN),
            "attn_k.bias": (kv,),
            "attn_v.weight": (kv, HIDDEN),
            "attn_v.bias": (kv,),
            "attn_output.weight": (HIDDEN, HIDDEN),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = (shape, "F32", rng.standard_normal(shape).astype(np.float32).tobytes())
        else:
            blocks = np.zeros((shape[0] * shape[1] // 32, 34), np.uint8)
            blocks[:, :2] = rng.standard_normal((len(blocks), 1)).astype(np.float16).view(np.uint8)
            blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 32))
            tensors[name] = (shape, "Q8_0", blocks.tobytes())
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.block_count": LAYERS,
        "qwen2.context_length": 64,
        "qwen2.embedding_length": HIDDEN,
        "qwen2.feed_forward_length": INNER,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 1e6,
    }
    return write_gguf(path, metadata, tensors)


def pack(model: Path, folder: Path | None) -> PackedWeights:
    """As a start would, waiting for what it keeps."""
    loaded = load_model(ModelConfig(model=str(model)))
    shapes = {name: spec.shape for name, spec in loaded.program.weights.items()}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    kernels, pool = _kernels.Kernels(), _kernels.ThreadPool(1)
    cache = PackedCache(str(folder), 2) if folder is not None else None
    weights = PackedWeights(kernels, pool, loaded.weights, shapes, matrices, cache)
    weights.wait_kept()
    return weights


def content(weights: PackedWeights) -> tuple[packed.Directory, bytes]:
    """The directory and the bytes of panels and vectors, by name."""
    directory = weights.directory
    spans = [(part.offset, part.num_bytes) for parts in directory.matrices.values() for part in parts]
    spans += [(vector.offset, vector.size * 4) for vector in directory.vectors.values()]
    return directory, b"".join(packed.as_bytes(weights.address(at), size).tobytes() for at, size in spans)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def kept(folder: Path) -> Path:
    (path,) = folder.glob("*.bin")
    return path


@pytest.mark.parametrize("piece", [packed._PIECE, packed.PAGE])
def test_what_comes_back_is_what_was_packed(
    model: Path, folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the memory was one piece or, as in a large model, many."""
    monkeypatch.setattr(packed, "_PIECE", piece)
    monkeypatch.setattr(packed_cache, "_STEP", 3 * packed.PAGE)
    without = pack(model, None)
    first, second = pack(model, folder), pack(model, folder)
    assert (without.origin, first.origin, second.origin) == ("packed now", "packed now", "read from the cache")
    assert content(without) == content(first) == content(second)
    assert second.num_bytes == first.num_bytes > HIDDEN * VOCAB
    assert [p.name for p in folder.iterdir() if p.suffix == ".partial"] == []


def test_the_files_weights_are_not_read_when_packed_ones_are(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(model, folder)

    def fail(*args: object) -> Weight:
        raise AssertionError("a tensor was converted")

    monkeypatch.setattr("octavo.model_loader.gguf.GGUFCheckpoint.load", fail)
    assert pack(model, folder).origin == "read from the cache"


def _flip(share: float, at: int = 0) -> Callable[[bytes], bytes]:
    """Changes one bit of the byte ``at`` bytes after ``share`` of the file."""

    def flip(data: bytes) -> bytes:
        where = int(share * len(data)) + at
        return data[:where] + bytes([data[where] ^ 16]) + data[where + 1 :]

    return flip


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:5], id="torn in the magic"),
        pytest.param(lambda data: data[:100], id="torn in the header"),
        pytest.param(lambda data: data[:-1], id="a byte short"),
        pytest.param(lambda data: data[: packed.PAGE * 3], id="torn in the panels"),
        pytest.param(lambda data: data + bytes(packed.PAGE), id="too long"),
        pytest.param(lambda data: data[: packed.PAGE * 2] + bytes(len(data) - packed.PAGE * 2), id="zeros at the end"),
        pytest.param(_flip(0), id="foreign magic"),
        pytest.param(lambda data: data[:8] + b"\xff" * 4 + data[12:], id="huge header"),
        pytest.param(_flip(0, 60), id="altered header"),
        pytest.param(_flip(0.5), id="one bit of the panels"),
        pytest.param(lambda data: b"GGUF" * (len(data) // 4), id="another file"),
    ],
)
def test_a_damaged_file_is_packed_anew(
    model: Path, folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    right = content(pack(model, folder))
    path = kept(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        again = pack(model, folder)
    assert again.origin == "packed now"
    assert content(again) == right
    assert str(path) in caplog.text
    assert kept(folder).read_bytes() == whole
    assert pack(model, folder).origin == "read from the cache"


def test_a_file_under_the_wrong_name_is_not_used(model: Path, folder: Path, tmp_path: Path) -> None:
    pack(model, folder)
    path = kept(folder)
    whole = path.read_bytes()
    path.unlink()
    other = write_model(tmp_path / "other.gguf", seed=1)
    right = content(pack(other, None))
    pack(other, folder)
    kept(folder).write_bytes(whole)
    assert content(pack(other, folder)) == right


def test_a_model_of_equal_size_and_date_is_another(model: Path, folder: Path) -> None:
    pack(model, folder)
    first, before = kept(folder), model.stat()
    data = bytearray(model.read_bytes())
    data[-40] ^= 1
    with model.open("r+b") as file:
        file.write(data)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (model.stat().st_size, model.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    weights = pack(model, folder)
    assert weights.origin == "packed now"
    assert content(weights) == content(pack(model, None))
    assert kept(folder) != first  # and the outdated one is gone


def test_what_nobody_reads_again_is_removed(model: Path, folder: Path, tmp_path: Path) -> None:
    gone = write_model(tmp_path / "gone.gguf", seed=1)
    pack(gone, folder)
    outdated = kept(folder)
    gone.unlink()
    (folder / "torn.partial").write_bytes(b"x")
    pack(model, folder)
    assert kept(folder) != outdated
    assert not list(folder.glob("*.partial"))


def test_nothing_stays_of_a_writer_that_was_killed(model: Path, folder: Path, tmp_path: Path) -> None:
    """The next start packs and keeps; and a start of another model, which has nothing to write, clears up too."""
    pack(other := write_model(tmp_path / "other.gguf", seed=1), folder)
    script = """
import os, signal, sys
from pathlib import Path
from octavo.backends.cpu import packed_cache
from tests.kernels.test_packed_cache import pack

def killed(fd, data):
    os.write(fd, memoryview(data)[:100])
    os.kill(os.getpid(), signal.SIGKILL)

packed_cache._write_whole = killed
pack(Path(sys.argv[1]), Path(sys.argv[2]))
"""
    for restarted in (other, model):
        child = subprocess.run([sys.executable, "-c", script, str(model), str(folder)], timeout=60, check=False)
        assert child.returncode == -signal.SIGKILL
        assert len(list(folder.glob("*.partial"))) == 1
        pack(restarted, folder)
        assert not list(folder.glob("*.partial"))
    assert pack(model, folder).origin == "read from the cache"


def test_the_oldest_go_beyond_the_limit(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [model, *(write_model(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2))]
    pack(models[0], folder)
    size = kept(folder).stat().st_size
    monkeypatch.setattr(packed_cache, "LIMIT", 2 * size)
    os.utime(kept(folder), (1, 1))
    pack(models[1], folder)
    assert pack(models[1], folder).origin == "read from the cache"
    pack(models[2], folder)
    assert [pack(m, folder).origin for m in models[1:]] == ["read from the cache"] * 2
    assert len(list(folder.glob("*.bin"))) == 2


def test_a_folder_that_cannot_be_written_costs_a_line(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        weights = pack(model, tmp_path / "file" / "packed")
    assert content(weights) == content(pack(model, None))
    assert "not kept" in caplog.text or "not used" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_costs_a_line(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o500)
    with caplog.at_level(logging.WARNING):
        assert content(pack(model, folder)) == content(pack(model, None))
    assert "not kept" in caplog.text


def test_a_full_disk_costs_a_line(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache.os, "write", full)
    with caplog.at_level(logging.WARNING):
        assert content(pack(model, folder)) == content(pack(model, None))
    assert "No space left" in caplog.text
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_too_little_room_is_left_alone(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "_FREE", 1 << 62)
    with caplog.at_level(logging.WARNING):
        pack(model, folder)
    assert "not enough free space" in caplog.text
    assert not list(folder.glob("*.bin"))


def _start(model: Path, folder: Path, results: multiprocessing.Queue[tuple[str, bytes]]) -> None:
    weights = pack(model, folder)
    results.put((weights.origin, content(weights)[1]))


def test_starts_at_the_same_time(model: Path, folder: Path) -> None:
    """All get the same bytes; one file is kept, whole."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[str, bytes]] = context.Queue()
    starts = [context.Process(target=_start, args=(model, folder, results)) for _ in range(3)]
    for start in starts:
        start.start()
    found = [results.get(timeout=120) for _ in starts]
    for start in starts:
        start.join(120)
    assert {bytes_ for _, bytes_ in found} == {content(pack(model, None))[1]}
    assert pack(model, folder).origin == "read from the cache"
    assert [p.suffix for p in sorted(folder.iterdir())] == [".bin", ""]


def test_while_another_process_writes_nothing_is_kept(model: Path, folder: Path) -> None:
    folder.mkdir()
    with packed_cache._only_one(folder / "lock") as mine:
        assert mine
        pack(model, folder)
    assert not list(folder.glob("*.bin"))
    pack(model, folder)
    assert kept(folder).exists()
