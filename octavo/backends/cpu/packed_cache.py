"""Packed weights kept on disk between starts: ``<folder>/<key>.bin``, read into memory, never mapped.

    8 bytes magic | u32 length | header, msgpack: Entry | its SHA-256 | to the next page | the packed bytes

The key says what was packed (the files' identity, octavo's readers) and by what (these kernels, as a file): a changed
layout is another key. What is read is checked as a whole, so a torn, foreign or altered file is packed anew. A file
appears by a rename once it is complete. Reading costs 0.12 s of one core per GiB; a mapping would save half
of that, but the bytes would go unchecked, a truncated file would kill the process in the middle of a step, and files'
pages are small ones. A cache that cannot be used costs a line in the log, never a start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.backends.cpu import _kernels
from octavo.backends.cpu.packed import PAGE, Directory, Pieces, as_bytes
from octavo.quantization.base import LazyWeights, Weights

logger = logging.getLogger(__name__)

_MAGIC = b"octavoPW"
_STEP = 4 << 20  # bytes read or written, and summed up, at a time: they stay in the cache
_MAX_HEADER = 64 << 20
_FREE = 1 << 30  # bytes of disk that a new file leaves free
LIMIT = 64 << 30  # bytes of all files; beyond, the oldest go


class Entry(msgspec.Struct):
    """The header. ``sources``: the files that were packed; ``spans``: (bytes, their sum) of all the bytes in order."""

    key: str
    sources: tuple[str, ...]
    directory: Directory
    spans: list[tuple[int, int]]


class PackedCache:
    """The cache in ``folder``, which need not exist. ``threads`` is how many read at a time."""

    def __init__(self, folder: str, threads: int) -> None:
        self.folder, self.threads = Path(folder), threads

    def slot(self, weights: Weights, layout: str) -> Slot | None:
        """The place of ``weights`` packed as ``layout`` says; None when they come from no files, or these are gone."""
        return Slot(self, weights, layout) if isinstance(weights, LazyWeights) and weights.identity() else None


class Slot:
    """The file of one model's packed weights, there or not."""

    def __init__(self, cache: PackedCache, weights: LazyWeights, layout: str) -> None:
        self._folder, self._threads = cache.folder, cache.threads
        self._layout = layout
        self._key = self._make_key(weights)
        self.path = self._folder / f"{self._key}.bin"
        self._writer: threading.Thread | None = None
        self._refused: os.stat_result | None = None  # a file that was there and of no use

    def _make_key(self, weights: LazyWeights) -> str:
        return hashlib.sha256("\n".join([weights.identity(), _code(), self._layout]).encode()).hexdigest()[:32]

    def read(self, fits: Callable[[Directory], bool]) -> tuple[Directory, Pieces] | None:
        """The packed weights if they are there, whole, and ``fits``."""
        try:
            with self.path.open("rb", buffering=0) as file:
                self._refused = os.fstat(file.fileno())
                entry, start = _read_header(file.fileno())
                if entry.key != self._key or not fits(entry.directory):
                    raise ValueError("it holds something else")
                memory = self._read_bytes(file.fileno(), entry, start)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError, MemoryError) as error:
            logger.warning("%s is not used: %s", self.path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(self.path)  # the oldest go first
            with _only_one(self._folder / "lock") as mine:
                if mine:
                    _remove_partial(self._folder)
        return entry.directory, memory

    def _read_bytes(self, fd: int, entry: Entry, start: int) -> Pieces:
        total, starts = entry.directory.total, [0, *accumulate(size for size, _ in entry.spans)]
        sizes_ok = all(0 < size <= _STEP and size % PAGE == 0 for size, _ in entry.spans)
        if not sizes_ok or starts[-1] != total or os.fstat(fd).st_size != start + total:
            raise ValueError("its length is wrong")
        memory = Pieces()
        memory.take(total)

        def read(index: int) -> bool:
            size, expected = entry.spans[index]
            span = as_bytes(memory.address(starts[index]), size)
            return os.preadv(fd, [span.data], start + starts[index]) == size and _sum(span) == expected

        with ThreadPoolExecutor(self._threads) as readers:
            if not all(readers.map(read, range(len(entry.spans)))):
                raise ValueError("its bytes are damaged")
        return memory

    def write(self, weights: Weights, directory: Directory, memory: Pieces) -> None:
        """Keep ``memory``, made of ``weights``, which must not change any more.

        Works in the background, and keeps the process alive. Does nothing if the weights' files have changed since:
        it is not known then which of them were read.
        """
        if isinstance(weights, LazyWeights) and self._make_key(weights) == self._key:
            args = (directory, memory, weights.sources)
            self._writer = threading.Thread(target=self._write, args=args, name="octavo-packed")
            self._writer.start()

    def wait(self) -> None:
        """Until what was begun to be written is written."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, directory: Directory, memory: Pieces, sources: tuple[str, ...]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _only_one(self._folder / "lock") as mine:
                if mine and not self._written_by_another():
                    _clean(self._folder, directory.total, sources)
                    self._write_file(directory, memory, sources)
        except (OSError, ValueError) as error:
            logger.warning("packed weights are not kept, so the next start packs again: %s", error)

    def _written_by_another(self) -> bool:
        """Whether a process that started at the same time has written the file since ``read``."""
        with contextlib.suppress(FileNotFoundError):
            now = self.path.stat()
            return self._refused is None or not os.path.samestat(now, self._refused)
        return False

    def _write_file(self, directory: Directory, memory: Pieces, sources: tuple[str, ...]) -> None:
        if shutil.disk_usage(self._folder).free < directory.total + _FREE:
            raise OSError(f"{self._folder}: not enough free space for {directory.total / 2**20:.0f} MiB")
        partial = self.path.with_suffix(".partial")
        try:
            with partial.open("wb", buffering=0) as file:
                spans = memory.spans(_STEP)
                sums = [(len(span), _sum(span)) for span in spans]
                header = msgspec.msgpack.encode(Entry(self._key, sources, directory, sums))
                head = _MAGIC + len(header).to_bytes(4, "little") + header + hashlib.sha256(header).digest()
                _write_whole(file.fileno(), head + bytes(-len(head) % PAGE))
                for span in spans:
                    _write_whole(file.fileno(), span)  # no fsync: it may take minutes, and a reader checks every byte
            partial.rename(self.path)
        finally:
            partial.unlink(missing_ok=True)


def _remove_partial(folder: Path) -> None:
    """Remove what processes left that were killed while they wrote."""
    for leftover in folder.glob("*.partial"):
        leftover.unlink(missing_ok=True)


def _clean(folder: Path, coming: int, sources: tuple[str, ...]) -> None:
    """Remove what will not be read again, then the oldest, until ``coming`` more bytes are within the limit."""
    _remove_partial(folder)
    kept: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.bin"):
        try:
            with path.open("rb", buffering=0) as file:
                entry, _ = _read_header(file.fileno())
                stat = os.fstat(file.fileno())
            outdated = entry.sources == sources or not all(map(os.path.exists, entry.sources))
        except (OSError, ValueError, msgspec.MsgspecError):
            outdated = True
        if outdated:
            path.unlink(missing_ok=True)
        else:
            kept.append((stat.st_mtime, stat.st_size, path))
    total = coming + sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total > LIMIT:
            path.unlink(missing_ok=True)
            total -= size


@cache
def _code() -> str:
    """What decides about the layout: the native module, and the code that drives it."""
    assert _kernels.__file__ is not None
    digest = hashlib.sha256()
    for path in (Path(_kernels.__file__), *(Path(__file__).with_name(name) for name in ("weights.py", "packed.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_header(fd: int) -> tuple[Entry, int]:
    """The header and where the bytes begin. Raises ValueError or a msgspec error."""
    head = os.pread(fd, 12, 0)
    length = int.from_bytes(head[8:], "little")
    if head[:8] != _MAGIC or len(head) < 12 or length > _MAX_HEADER:
        raise ValueError("it holds no packed weights")
    header = os.pread(fd, length, 12)
    if os.pread(fd, 32, 12 + length) != hashlib.sha256(header).digest():
        raise ValueError("its header is damaged")
    return msgspec.msgpack.decode(header, type=Entry), -(-(12 + length + 32) // PAGE) * PAGE


def _sum(span: npt.NDArray[np.uint8]) -> int:
    """Of whole pages as words, wrapping around. Catches what is missing, zero or altered; it is no signature."""
    return int(span.view(np.uint64).sum(dtype=np.uint64))


def _write_whole(fd: int, data: Any) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    """Whether this is the only process here, which it then stays within."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        yield mine
    finally:
        os.close(fd)
