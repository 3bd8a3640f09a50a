"""Cores and memory of made-up machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.platforms import cpu
from octavo.platforms.cpu import CpuPlatform
from octavo.platforms.registry import make_platform


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
    assert CpuPlatform(tmp_path).device_name() == "unknown CPU"
    assert CpuPlatform(tmp_path).available_memory() == 0


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
    assert CpuPlatform(root).available_memory() == expected


def test_high_water_marks_and_outer_groups_bind_too(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 4096 kB",
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/memory.max": str(3 << 20),
            "sys/fs/cgroup/a/memory.current": str(1 << 20),
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.high": str(2 << 20),
            "sys/fs/cgroup/a/b/memory.current": str(1 << 19),
        },
    )
    assert CpuPlatform(root).available_memory() == (2 << 20) - (1 << 19)
    (root / "sys/fs/cgroup/a/memory.current").write_text(str((3 << 20) - 4096))
    assert CpuPlatform(root).available_memory() == 4096


@pytest.mark.parametrize("path", ["/docker/x", "/"])
def test_memory_of_a_version_1_cgroup(tmp_path: Path, path: str) -> None:
    """In a container its own folder is the mount's root, whatever the path says; on the host it is where that says."""
    inner = {} if path == "/" else {"sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": str(2 << 20)}
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 8192 kB",
            "proc/self/cgroup": f"3:cpu,cpuacct:/\n2:hugetlb,memory:{path}\n1:name=systemd:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(6 << 20),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 << 20),
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {1 << 20}",
            "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": str(1 << 20),
        }
        | inner,
    )
    assert CpuPlatform(root).available_memory() == ((1 << 20) if inner else (5 << 20))


def test_limits_of_this_process_bound_what_it_maps() -> None:
    code = (
        "import resource; from octavo.platforms.cpu import CpuPlatform; cpu = CpuPlatform()\n"
        "assert cpu.address_space_room() is None\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY)); room = cpu.address_space_room()\n"
        "held = bytearray(1 << 30); assert (1 << 30) <= room - cpu.address_space_room() < 1.1 * (1 << 30), room\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, resource.RLIM_INFINITY))\n"
        "assert 0 < cpu.address_space_room() < (1 << 30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_this_machine_answers() -> None:
    assert CpuPlatform().resident_memory() > 10 << 20
    assert CpuPlatform().resident_memory(2**22 + 1) == 0
    assert CpuPlatform().num_threads() >= 1
    assert make_platform().devices() == ["cpu"]
    assert CpuPlatform().available_memory() > 0
