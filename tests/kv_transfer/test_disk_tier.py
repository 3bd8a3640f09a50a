"""Blocks on disk: what was written comes back to the bit, and anything else does not come back."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.exceptions import ConfigError
from octavo.kv_transfer.chain import TierChain
from octavo.kv_transfer.connectors.disk.mover import DiskMover
from octavo.kv_transfer.connectors.disk.planner import DiskTier
from octavo.messages import KVMove, KVTierInfo, KVTierReport
from tests.kv_transfer.memory import BLOCK_BYTES, Memory, contents, key_of

FILE_BYTES = BLOCK_BYTES + 88


def open_mover(folder: Path, identity: str = "a", size: int = 1 << 20) -> tuple[DiskMover, Memory]:
    memory = Memory()
    return DiskMover(memory, identity, folder=str(folder), size=size), memory


def store(mover: DiskMover, memory: Memory, *seeds: int) -> KVTierReport:
    """Write blocks, and wait for the writer."""
    for seed in seeds:
        memory.fill(1, seed)
        mover.move([KVMove("disk", "store", key_of(seed), 1)])
    while mover._queued > mover._written:
        time.sleep(0.001)
    return mover.report()


def load(mover: DiskMover, memory: Memory, seed: int) -> bool:
    """Whether the block came, and is the right one."""
    memory.blocks[2] = 0
    mover.move([KVMove("disk", "load", key_of(seed), 2)])
    report = mover.report()
    if report.failed:
        assert report.failed == [(key_of(seed), 2)]
        assert not memory.blocks[2].any(), "a block that failed was written to the pool"
        return False
    assert (memory.blocks[2] == contents(seed)).all()
    assert report.traffic.blocks_loaded == 1
    return True


def path_of(folder: Path, seed: int) -> Path:
    [path] = folder.glob(f"*/{key_of(seed).hex()}.kv")
    return path


def test_blocks_survive_the_process(tmp_path: Path) -> None:
    mover, memory = open_mover(tmp_path)
    assert store(mover, memory, 1, 2, 3).kept == [key_of(1), key_of(2), key_of(3)]
    mover.move([KVMove("disk", "drop", key_of(2))])
    mover.close()
    again, other = open_mover(tmp_path)
    assert set(again.info.keys) == {key_of(1), key_of(3)}
    assert load(again, other, 1)
    assert load(again, other, 3)
    assert not load(again, other, 2)
    assert path_of(tmp_path, 1).stat().st_size == FILE_BYTES
    assert oct(path_of(tmp_path, 1).stat().st_mode & 0o777) == "0o600"
    again.close()


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    mover, memory = open_mover(tmp_path)
    for seed in range(50):
        memory.fill(1, seed)
        mover.move([KVMove("disk", "store", key_of(seed), 1)])
    mover.close()
    assert len(list(tmp_path.glob("*/*.kv"))) == 50


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: bytes(len(data)),
        lambda data: b"x" * len(data),
    ],
    ids=["short", "half", "empty", "long", "zeros", "other"],
)
def test_a_damaged_file_is_no_block(tmp_path: Path, damage: Any) -> None:
    mover, memory = open_mover(tmp_path)
    store(mover, memory, 1, 2)
    path = path_of(tmp_path, 1)
    path.write_bytes(damage(path.read_bytes()))
    assert not load(mover, memory, 1)
    assert load(mover, memory, 2)
    mover.close()
    again, other = open_mover(tmp_path)
    assert not load(again, other, 1)
    assert load(again, other, 2)
    again.close()


@given(bit=st.integers(0, 8 * FILE_BYTES - 1))
@settings(max_examples=60, deadline=None)
def test_no_flipped_bit_passes(bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("disk")
    mover, memory = open_mover(folder)
    store(mover, memory, 1)
    path = path_of(folder, 1)
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    assert not load(mover, memory, 1)
    mover.close()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def link_to_file(path: Path) -> None:
    path.with_suffix(".other").write_bytes(b"x" * FILE_BYTES)
    path.symlink_to(path.with_suffix(".other"))


THINGS = [pipe, link_to_pipe, link_to_file, Path.mkdir, lambda path: path.symlink_to("/dev/zero")]


@pytest.mark.parametrize("make", THINGS, ids=["pipe", "link to a pipe", "link to a file", "folder", "link to a device"])
def test_what_is_no_file_keeps_nobody_waiting(tmp_path: Path, make: Any) -> None:
    """Where a block is looked for, where one is written first, and when a process starts."""
    mover, memory = open_mover(tmp_path)
    store(mover, memory, 1)
    path = path_of(tmp_path, 1)
    path.unlink()
    make(path)
    assert not load(mover, memory, 1)
    partial = mover._files.folder / f"{key_of(2).hex()}.partial"
    make(partial)
    for seed in (2, 3):
        mover._resume = 0.0
        kept = store(mover, memory, seed).kept
    assert kept == [key_of(3)]
    mover.close()
    again, other = open_mover(tmp_path)
    assert again.info.keys == [key_of(3)]
    assert load(again, other, 3)
    again.close()


@pytest.mark.parametrize("digits", [1, 63, 65, 129, 200])
def test_names_that_are_no_keys(tmp_path: Path, digits: int) -> None:
    mover, _ = open_mover(tmp_path)
    (mover._files.folder / f"{'a' * digits}.kv").write_bytes(b"x" * FILE_BYTES)
    mover.close()
    again, _ = open_mover(tmp_path)
    assert again.info.keys == []
    again.close()


def test_times_of_files_decide_only_the_order(tmp_path: Path) -> None:
    mover, memory = open_mover(tmp_path)
    store(mover, memory, 1, 2, 3)
    for seed, when in ((1, 2**33), (2, -5), (3, 0)):
        os.utime(path_of(tmp_path, seed), (when, when))
    mover.close()
    again, other = open_mover(tmp_path, size=2 * FILE_BYTES)
    assert again.info.keys == [key_of(3), key_of(1)]
    assert load(again, other, 1)
    again.close()


def test_files_of_others_are_not_read(tmp_path: Path) -> None:
    """Another model's file, renamed to a key that is asked for; and things that are no files."""
    mover, memory = open_mover(tmp_path, "a")
    store(mover, memory, 1, 2)
    foreign, _ = open_mover(tmp_path, "b")
    assert foreign.info.keys == []
    store(foreign, memory, 3)
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 3).read_bytes())
    assert not load(mover, memory, 1)
    path_of(tmp_path, 2).write_bytes(path_of(tmp_path, 2).read_bytes())
    home = path_of(tmp_path, 2).parent
    (home / f"{key_of(9).hex()}.kv").mkdir()
    (home / "notes.txt").write_text("mine")
    (home / "zz.kv").write_text("mine")
    mover.close()
    again, other = open_mover(tmp_path, "a")
    assert load(again, other, 2)
    assert not load(again, other, 9)
    assert (home / "notes.txt").exists()
    assert (home / "zz.kv").exists()
    foreign.close()
    again.close()


def test_the_second_process_only_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mover, memory = open_mover(tmp_path)
    store(mover, memory, 1)
    second, other = open_mover(tmp_path)
    assert (second.info.writable, second.info.keys) == (False, [key_of(1)])
    assert "only reads" in caplog.text
    assert load(second, other, 1)
    second.move([KVMove("disk", "store", key_of(2), 1), KVMove("disk", "store", key_of(3), 1)])
    second.move([KVMove("disk", "drop", key_of(1))])
    second.close()
    assert load(mover, memory, 1)
    assert len(list(tmp_path.glob("*/*.kv"))) == 1
    mover.close()
    third, _ = open_mover(tmp_path)
    assert third.info.writable
    third.close()


def test_whoever_only_looks_at_the_lock_does_not_take_it(tmp_path: Path) -> None:
    """As another model's server does when it starts, to see whether it may remove files."""
    mover, _ = open_mover(tmp_path)
    mover.close()
    fd = os.open(mover._files.folder / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    timer = threading.Timer(0.05, os.close, [fd])
    timer.start()
    again, _ = open_mover(tmp_path)
    assert again.info.writable
    again.close()
    timer.join()


def test_a_full_disk_makes_the_tier_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mover, memory = open_mover(tmp_path)
    store(mover, memory, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES // 2, limits[1]))
        report = store(mover, memory, 2, 3, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(report.lost) == {key_of(2), key_of(3), key_of(4)}
    assert caplog.text.count("takes no KV blocks") == 1
    assert store(mover, memory, 5).lost == [key_of(5)]
    assert load(mover, memory, 1)
    assert sorted(path.suffix for path in tmp_path.glob("*/*")) == ["", ".kv"]
    mover._resume = 0.0  # a while later
    assert store(mover, memory, 5).kept == [key_of(5)]
    mover.close()


def test_a_folder_that_vanishes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mover, memory = open_mover(tmp_path)
    store(mover, memory, 1)
    shutil.rmtree(mover._files.folder)
    assert not load(mover, memory, 1)
    for seed in range(3):
        mover._resume = 0.0
        assert store(mover, memory, seed).lost == [key_of(seed)]
    assert caplog.text.count("takes no KV blocks") == 1
    mover.close()


def test_a_slow_disk_drops_instead_of_stalling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mover, _ = open_mover(tmp_path)
    mover._most_queued = 3
    release = threading.Event()
    write = mover._files.write
    monkeypatch.setattr(mover._files, "write", lambda key, data: (release.wait(), write(key, data)))
    for seed in range(5):
        mover.move([KVMove("disk", "store", key_of(seed), 1)])
    assert mover.report().lost == [key_of(3), key_of(4)]
    release.set()
    mover.close()
    assert mover.report().kept == [key_of(0), key_of(1), key_of(2)]


def test_the_limit_holds_for_all_models_together(tmp_path: Path) -> None:
    mover, memory = open_mover(tmp_path, "a", size=10 * FILE_BYTES)
    assert mover.info.capacity == 10
    store(mover, memory, *range(10))
    for seed in range(10):
        os.utime(path_of(tmp_path, seed), (seed, seed))
    mover.close()
    other, other_memory = open_mover(tmp_path, "b", size=10 * FILE_BYTES)
    assert other.info.capacity == 5
    store(other, other_memory, 100)
    assert len(list(tmp_path.glob("*/*.kv"))) == 6
    again, memory = open_mover(tmp_path, "a", size=10 * FILE_BYTES)
    assert again.info.keys == [key_of(seed) for seed in range(5, 10)]  # the oldest went
    again.close()
    other.close()
    small, _ = open_mover(tmp_path, "a", size=3 * FILE_BYTES)
    assert small.info.keys == [key_of(8), key_of(9)]  # one place is the other model's
    small.close()


def test_a_limit_below_one_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_dir_size = 100: .* takes {FILE_BYTES} bytes"):
        open_mover(tmp_path, size=100)


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_cache_dir"):
        open_mover(tmp_path / where)


def test_a_process_killed_while_writing_leaves_no_harm(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from octavo.messages import KVMove
        from tests.kv_transfer.memory import key_of
        from tests.kv_transfer.test_disk_tier import open_mover
        mover, memory = open_mover(Path(sys.argv[1]))
        for seed in range(20_000):
            memory.fill(1, seed)
            mover.move([KVMove("disk", "store", key_of(seed), 1)])
            if seed > 100 and mover._written > 50:
                print("going", flush=True)
        sys.stdin.read()
    """)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    [home] = [path for path in tmp_path.iterdir() if path.is_dir()]
    (home / "torn.partial").write_bytes(b"half")
    mover, memory = open_mover(tmp_path)
    assert mover.info.writable
    assert mover.info.keys
    seeds = {key_of(seed): seed for seed in range(20_000)}
    for key in mover.info.keys:
        assert load(mover, memory, seeds[key])
    assert not list(home.glob("*.partial"))
    mover.close()


def test_the_planner_loads_only_what_is_kept() -> None:
    moves: list[KVMove] = []
    tier = DiskTier(KVTierInfo(capacity=2, block_bytes=1, keys=[b"old"]), moves.append)
    tier.filled(b"new", 4)
    assert (tier.has(b"old"), tier.has(b"new")) == (True, False)
    tier.settle(KVTierReport(kept=[b"new"]))
    assert tier.has(b"new")
    tier.load(b"old", 5)
    tier.filled(b"third", 6)
    assert not tier.has(b"new")
    tier.settle(KVTierReport(lost=[b"third"]))
    assert len(tier) == 1
    tier.pin(b"old")
    tier.filled(b"a", 1)
    tier.filled(b"b", 2)
    assert tier.has(b"old")
    tier.release(b"old")
    assert [(move.kind, move.key) for move in moves] == [
        ("store", b"new"), ("load", b"old"), ("drop", b"new"), ("store", b"third"),
        ("store", b"a"), ("drop", b"a"), ("store", b"b"),
    ]  # fmt: skip


def test_no_file_is_left_that_the_planner_does_not_know() -> None:
    """A key is stored, forgotten and stored again before the first store's end is known, which was a loss."""
    moves: list[KVMove] = []
    tier = DiskTier(KVTierInfo(capacity=2, block_bytes=1), moves.append)
    tier.filled(b"key", 1)
    tier.forget(b"key")
    tier.filled(b"key", 1)
    tier.settle(KVTierReport(lost=[b"key"]))
    tier.settle(KVTierReport(kept=[b"key"]))
    assert len(tier) == 0
    assert [move.kind for move in moves] == ["store", "drop", "store", "drop"]


def test_a_step_that_raised_may_have_carried_the_news() -> None:
    """Of a store: its key is dropped, for nobody would ever load it."""
    moves: list[KVMove] = []
    chain = TierChain([lambda emit: DiskTier(KVTierInfo(capacity=2, block_bytes=1, keys=[b"old"]), emit)])
    chain.filled(b"key", 1)
    assert [move.kind for move in chain.take_moves(1)] == ["store"]
    chain.settle(1, {}, 0, 0.0)
    chain.forget([b"old"])
    assert [move.kind for move in chain.take_moves(2)] == ["drop"]
    chain.void()
    moves = chain.take_moves(3)
    assert [(move.kind, move.key) for move in moves] == [("drop", b"old"), ("drop", b"key")]
    assert not chain.has_moves


def test_what_is_used_in_the_pool_stays() -> None:
    moves: list[KVMove] = []
    tier = DiskTier(KVTierInfo(capacity=2, block_bytes=1, keys=[b"system", b"other"]), moves.append)
    tier.used(b"system")
    tier.filled(b"new", 3)
    assert tier.has(b"system")
    assert not tier.has(b"other")
