"""Blocks as files: ``<folder>/<key in hex>.kv``, one a block, checked as a whole when it is read.

    8 bytes magic | 32 identity | 32 SHA-256 of the key | u64 length | u32 CRC of the data | u32 CRC of all this | data

A file appears by a rename once it is complete. The identity says what computed it, so a file of another model, other
kernels or another layout is no file of ours, wherever it lies. The CRC finds what is torn or flipped; it is no
signature. The time of a file is that of its last use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import zlib
from pathlib import Path

from octavo.kv_transfer.base import ByteArray

_MAGIC = b"octavoK1"  # another layout of files is another magic
_HEAD = struct.Struct("<8s32s32sQII")
_NAME = re.compile(r"([0-9a-f]{64,128})\.kv")


class BlockFiles:
    """The files of ``identity`` (32 bytes) in ``folder``, each with one block of ``block_bytes``."""

    def __init__(self, folder: Path, identity: bytes, block_bytes: int) -> None:
        self.folder, self._identity, self._block_bytes = folder, identity, block_bytes
        self.file_bytes = _HEAD.size + block_bytes

    def write(self, key: bytes, data: ByteArray) -> None:
        """Keep ``data`` [block_bytes] under ``key``. Raises OSError, and leaves nothing behind."""
        path = self._path(key)
        partial = path.with_suffix(".partial")
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                parts = [memoryview(self._head(key, zlib.crc32(data.data))), data.data]
                while parts:
                    count = os.writev(fd, parts)  # no fsync: a reader checks every byte
                    while parts and count >= len(parts[0]):
                        count -= len(parts.pop(0))
                    if count:
                        parts[0] = parts[0][count:]
            finally:
                os.close(fd)
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def read(self, key: bytes, out: ByteArray) -> None:
        """Fill ``out`` [file_bytes], the block behind the head.

        Raises OSError or ValueError, and leaves anything in ``out``.
        """
        path = self._path(key)
        with path.open("rb", buffering=0) as file:
            count = 0
            while part := file.readinto(out.data[count:]):
                count += part
            if count != len(out) or os.fstat(file.fileno()).st_size != len(out):
                raise ValueError(f"{path} has another length")
        if bytes(out[: _HEAD.size]) != self._head(key, zlib.crc32(out.data[_HEAD.size :])):
            raise ValueError(f"{path} is damaged, or of something else")
        with contextlib.suppress(OSError):
            os.utime(path)

    def block(self, out: ByteArray) -> ByteArray:
        """The block in what :meth:`read` filled."""
        return out[_HEAD.size :]

    def remove(self, key: bytes) -> None:
        """There is no such file afterwards, if the system allows it."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.kv"

    def _head(self, key: bytes, data_sum: int) -> bytes:
        fields = (_MAGIC, self._identity, hashlib.sha256(key).digest(), self._block_bytes, data_sum)
        start = _HEAD.pack(*fields, 0)[:-4]
        return start + zlib.crc32(start).to_bytes(4, "little")


def listed(folder: Path) -> list[tuple[float, int, bytes, Path]]:
    """The block files of a folder, least recently used first: time, bytes, key, path."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, stat.st_size, bytes.fromhex(match[1]), Path(entry.path)))
    return sorted(found)


def remove_partial(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote."""
    for leftover in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            leftover.unlink(missing_ok=True)
