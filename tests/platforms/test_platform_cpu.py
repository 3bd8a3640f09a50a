"""Cores and memory of made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.platforms import cpu


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def topology(pairs: dict[int, str]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": text for n, text in pairs.items()}


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    root = write(tmp_path, topology({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}))
    assert cpu.physical_cores({0, 1, 2, 3}, root) == 2
    assert cpu.physical_cores({0, 2}, root) == 1


def test_the_cgroup_quota_of_any_level_binds(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/cpu.max": "max 100000",
            "sys/fs/cgroup/a/cpu.max": "250000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        },
    )
    assert cpu.cpu_quota(root) == 2.5
    assert cpu.physical_cores(set(range(8)), root) == 2


def test_without_any_facts_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert cpu.physical_cores({0, 1, 2}, tmp_path) == 3
    assert cpu.cpu_name(tmp_path) == "unknown CPU"
    assert cpu.available_memory(tmp_path) == 0


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 4096 * 1024), (str(3 << 20), (3 << 20) - (2 << 20) + (1 << 19))]
)
def test_memory_is_the_least_of_machine_and_cgroup(tmp_path: Path, limit: str, expected: int) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8192 kB\nMemAvailable: 4096 kB",
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": limit,
            "sys/fs/cgroup/memory.current": str(2 << 20),
            "sys/fs/cgroup/memory.stat": f"active_file 7\ninactive_file {1 << 19}",
        },
    )
    assert cpu.available_memory(root) == expected


def test_this_machine_answers() -> None:
    assert cpu.physical_cores() >= 1
    assert cpu.available_memory() > 0
