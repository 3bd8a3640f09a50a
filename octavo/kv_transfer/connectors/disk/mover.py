"""DiskMover: blocks to and from files, in a folder for each identity of what computed them.

    <kv_cache_dir>/<identity>/lock             held by the one process that writes here; another one only reads
                              <key>.kv ...     see ``files``

The step waits for loads, which are reads; stores are copied, and written by a thread of their own. What that thread is
too slow for is dropped: a block less in the cache, never a step that stalls. A disk that takes no more costs one line
in the log, and is tried again after a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from octavo.exceptions import ConfigError
from octavo.kv_transfer.base import BlockMemory, ByteArray
from octavo.kv_transfer.connectors.disk.files import BlockFiles, listed, remove_partial
from octavo.messages import KVMove, KVTierInfo, KVTierReport, KVTraffic

logger = logging.getLogger(__name__)

QUEUE_BYTES = 128 << 20  # most bytes that wait to be written
LEAST_QUEUED = 8  # blocks that may wait, however large they are
CLOSE_SECONDS = 3.0  # for what waits when the engine shuts down
PAUSE_SECONDS = 30.0  # after a write that failed, nothing is written for so long
LOCK_SECONDS = 0.25  # for a process that only looks at the lock


class DiskMover:
    """See ``TierMover``. ``size``: most bytes of all files in ``folder``, those of other identities included.

    Raises ConfigError if the folder cannot be made or read, or ``size`` is less than a block takes.
    """

    def __init__(self, memory: BlockMemory, identity: str, *, folder: str, size: int) -> None:
        self._memory = memory
        digest = hashlib.sha256(identity.encode()).digest()
        home = Path(folder).expanduser() / digest.hex()[:32]
        self._files = BlockFiles(home, digest, memory.block_bytes)
        least = self._files.file_bytes
        if size < least:
            raise ConfigError(f"kv_cache_dir_size = {size}: a KV block of this model takes {least} bytes")
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            self.info = self._open(size, writable=_lock(self._lock, LOCK_SECONDS))
        except OSError as error:
            raise ConfigError(f"kv_cache_dir = {folder!r}: {error.strerror}: {error.filename}") from error
        if not self.info.writable:
            logger.warning("%s: another process writes here; this one only reads", home)
        self._buffer = np.empty(self._files.file_bytes, np.uint8)
        self._failed: list[tuple[bytes, int]] = []
        self._ends: deque[tuple[bytes, bool]] = deque()  # of stores: key, kept or not; appended by the writer
        self._most_queued = max(LEAST_QUEUED, QUEUE_BYTES // memory.block_bytes)
        self._queued = 0  # blocks taken in
        self._written = 0  # and done with; the writer's own number
        self._loaded = 0
        self._seconds = 0.0
        self._resume = 0.0  # time; until then, nothing is written
        self._failing = False
        self._deadline: float | None = None
        self._tasks: SimpleQueue[tuple[bytes, ByteArray | None] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="octavo-kv-disk", daemon=True)
        self._writer.start()

    def _open(self, size: int, writable: bool) -> KVTierInfo:
        files, block_bytes = self._files, self._memory.block_bytes
        found = listed(files.folder)
        if not writable:
            keys = [key for _, length, key, _ in found if length == files.file_bytes]
            return KVTierInfo(capacity=len(keys), block_bytes=block_bytes, keys=keys, writable=False)
        remove_partial(files.folder)
        for _, length, key, _ in found:
            if length != files.file_bytes:
                files.remove(key)
        keys = [key for _, length, key, _ in found if length == files.file_bytes]
        capacity = max(0, size - _shrink_others(files.folder, size // 2)) // files.file_bytes
        for key in keys[: max(0, len(keys) - capacity)]:
            files.remove(key)
        kept = keys[len(keys) - min(capacity, len(keys)) :]
        return KVTierInfo(capacity=capacity, block_bytes=block_bytes, keys=kept)

    def move(self, moves: Sequence[KVMove]) -> None:
        if moves[0].kind == "load":
            start = time.perf_counter()
            for move in moves:
                self._load(move)
            self._seconds += time.perf_counter() - start
        else:
            for move in moves:
                self._queue(move)

    def _load(self, move: KVMove) -> None:
        try:
            self._files.read(move.key, self._buffer)
        except (OSError, ValueError) as error:
            logger.warning("a KV block is computed again: %s", error)
            self._failed.append((move.key, move.block_id))
        else:
            self._memory.write_blocks([move.block_id], self._files.block(self._buffer)[None])
            self._loaded += 1

    def _queue(self, move: KVMove) -> None:
        if not self.info.writable:
            return
        if move.kind == "drop":
            self._tasks.put((move.key, None))
        elif time.monotonic() < self._resume or self._queued - self._written >= self._most_queued:
            self._ends.append((move.key, False))
        else:
            data = np.empty((1, self._memory.block_bytes), np.uint8)
            self._memory.read_blocks([move.block_id], data)
            self._queued += 1
            self._tasks.put((move.key, data[0]))

    def report(self) -> KVTierReport:
        ends = [self._ends.popleft() for _ in range(len(self._ends))]
        failed, self._failed = self._failed, []
        size = self._memory.block_bytes
        kept = [key for key, is_kept in ends if is_kept]
        traffic = KVTraffic(
            blocks_loaded=self._loaded,
            load_seconds=self._seconds,
            bytes_loaded=self._loaded * size,
            bytes_stored=len(kept) * size,
        )
        self._loaded, self._seconds = 0, 0.0
        return KVTierReport(
            failed=failed, kept=kept, lost=[key for key, is_kept in ends if not is_kept], traffic=traffic
        )

    def close(self) -> None:
        """Write what waits, for CLOSE_SECONDS at most, and let another process write here."""
        self._deadline = time.monotonic() + CLOSE_SECONDS
        self._tasks.put(None)
        self._writer.join(CLOSE_SECONDS + 1)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    # ---- the writer's thread

    def _write(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._deadline is not None and time.monotonic() > self._deadline:
                return
            key, data = task
            if data is None:
                self._files.remove(key)
            else:
                self._ends.append((key, self._keep(key, data)))
                self._written += 1

    def _keep(self, key: bytes, data: ByteArray) -> bool:
        if time.monotonic() < self._resume:
            return False
        try:
            self._files.write(key, data)
        except OSError as error:
            self._resume = time.monotonic() + PAUSE_SECONDS
            if not self._failing:
                logger.warning("%s takes no KV blocks: %s", self._files.folder, error)
            self._failing = True
            return False
        self._failing = False
        return True


def _lock(fd: int, patience: float = 0.0) -> bool:
    """Whether this process is now the only one that holds the lock, after ``patience`` seconds at the latest."""
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        else:
            return True


def _shrink_others(home: Path, most: int) -> int:
    """Remove other identities' oldest files beyond ``most`` bytes, unless a process writes there; what is left."""
    found, total = [], 0
    for folder in home.parent.iterdir():
        if folder == home or not folder.is_dir():
            continue
        files = listed(folder)
        total += sum(length for _, length, _, _ in files)
        with contextlib.suppress(OSError):
            fd = os.open(folder / "lock", os.O_RDWR)
            try:
                if _lock(fd):
                    found += files
            finally:
                os.close(fd)
    for _, length, _, path in sorted(found):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= length
    return total


def make(memory: BlockMemory, identity: str, *, folder: str, size: int) -> DiskMover:
    """As the registry calls it."""
    return DiskMover(memory, identity, folder=folder, size=size)


def memory_bytes(*, folder: str, size: int) -> int:
    """Main memory that the tier takes at most, however large its blocks usually are."""
    return QUEUE_BYTES
