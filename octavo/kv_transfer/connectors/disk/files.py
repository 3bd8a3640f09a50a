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
import stat
import struct
import zlib
from pathlib import Path

from octavo.kv_transfer.base import ByteArray

_MAGIC = b"octavoK1"  # another layout of files is another magic
_HEAD = struct.Struct("<8s32s32sQII")
_NAME = re.compile(r"((?:[0-9a-f]{2}){32,64})\.kv")
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK  # a link may lead anywhere, and a pipe would keep who opens it waiting


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
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _PLAIN, 0o600)
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
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def read(self, key: bytes, out: ByteArray) -> None:
        """Fill ``out`` [file_bytes], the block behind the head.

        Raises OSError or ValueError, and leaves anything in ``out``.
        """
        path = self._path(key)
        fd = os.open(path, os.O_RDONLY | _PLAIN)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != len(out):
                raise ValueError(f"{path} is no file, or has another length")
            count = 0
            while part := os.readv(fd, [out.data[count:]]):
                count += part
            if count != len(out) or bytes(out[: _HEAD.size]) != self._head(key, zlib.crc32(out.data[_HEAD.size :])):
                raise ValueError(f"{path} is damaged, or of something else")
            with contextlib.suppress(OSError):
                os.utime(fd)
        finally:
            os.close(fd)

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


def listed(folder: Path) -> list[tuple[float, int, bytes, str]]:
    """The block files of a folder, least recently used first: time, bytes (0: no regular file), key, path."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    length = state.st_size if stat.S_ISREG(state.st_mode) else 0
                    found.append((state.st_mtime, length, bytes.fromhex(match[1]), entry.path))
    return sorted(found)


def remove_partial(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote."""
    for leftover in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            leftover.unlink(missing_ok=True)
