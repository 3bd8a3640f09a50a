"""What this machine's CPU offers this process: cores, memory, name.

Reads /proc, /sys and the cgroup (a container's limits count, not the host's). Knows nothing of models or kernels.
``root`` is where those folders are, so that a test can hand in a made-up machine.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cgroup_folders(root: Path) -> list[Path]:
    """The process's cgroup v2 folders, innermost first; a limit of any of them binds."""
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            inner = base / line[3:].lstrip("/")
            return [f for f in (inner, *inner.parents) if f == base or base in f.parents]
    return [base]


def _cgroup_v1_folders(root: Path, controller: str) -> list[Path]:
    """The same of a version 1 controller. In a container the path may be the host's: then the mount's root counts."""
    base = root / "sys/fs/cgroup" / controller
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            inner = base / path.lstrip("/")
            return [f for f in (inner, *inner.parents) if f == base or base in f.parents]
    return [base]


def usable_cpus() -> set[int]:
    """Logical CPUs this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time the cgroup grants, or None where there is no limit."""
    quotas = []
    for folder in _cgroup_folders(root):
        fields = (_read(folder / "cpu.max") or "").split()
        if len(fields) == 2 and fields[0] != "max":
            quotas.append(int(fields[0]) / int(fields[1]))
    quota, period = (
        _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
        _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    )
    if quota and period and int(quota) > 0:
        quotas.append(int(quota) / int(period))
    return min(quotas) if quotas else None


def physical_cores(cpus: set[int] | None = None, root: Path = ROOT) -> int:
    """Physical cores behind ``cpus`` (default: those usable), within the cgroup's quota; at least 1.

    Hyperthreads share the units that matrix kernels saturate, so one thread a core is what helps.
    """
    cpus = usable_cpus() if cpus is None else cpus
    cores = set()
    for cpu in cpus:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings if siblings else str(cpu))
    quota = cpu_quota(root)
    return max(1, min(len(cores), len(cores) if quota is None else int(quota)))


def _cgroup_memory(root: Path) -> int | None:
    """Bytes the cgroup still allows: limit - usage, page cache that can be dropped counted as free."""
    rooms = []
    for folder in _cgroup_folders(root):
        rooms += _rooms(folder, ("memory.max", "memory.high"), "memory.current", "inactive_file")
    for folder in _cgroup_v1_folders(root, "memory"):
        rooms += _rooms(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
    return min(rooms) if rooms else None


def _rooms(folder: Path, limits: Sequence[str], usage: str, droppable: str) -> list[int]:
    """What each of the ``limits`` that ``folder`` has still allows."""
    used = _read(folder / usage)
    found = [limit for name in limits if (limit := _read(folder / name)) and limit != "max"]
    if not used or not found:
        return []
    stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    return [int(limit) - int(used) + int(stat.get(droppable, 0)) for limit in found]


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    table = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        fields = value.split()
        if fields and fields[0].isdigit():
            table[name] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    return table


class CpuPlatform:
    """See ``platforms.base.Platform``: a machine whose processors run the model, in its main memory."""

    name = "cpu"

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def device_name(self) -> str:
        """The processor's name as the kernel reports it, or "unknown CPU"."""
        for line in (_read(self._root / "proc/cpuinfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model") and value.strip():
                return value.strip()
        return "unknown CPU"

    def devices(self) -> list[str]:
        return ["cpu"]

    def num_threads(self) -> int:
        return physical_cores(root=self._root)

    def available_memory(self) -> int:
        """Without swapping: the least of the machine's and the cgroup's room."""
        rooms = [meminfo(self._root).get("MemAvailable", 0)]
        cgroup = _cgroup_memory(self._root)
        if cgroup is not None:
            rooms.append(cgroup)
        return max(0, min(rooms))

    def resident_memory(self, pid: int | None = None) -> int:
        fields = (_read(self._root / f"proc/{pid or 'self'}/statm") or "").split()
        return int(fields[1]) * resource.getpagesize() if len(fields) > 1 else 0

    def address_space_room(self) -> int | None:
        """By ``ulimit -v`` and ``ulimit -d``."""
        sizes = {}
        for line in (_read(self._root / "proc/self/status") or "").splitlines():
            name, _, value = line.partition(":")
            if name in ("VmSize", "VmData"):
                sizes[name] = int(value.split()[0]) * 1024
        limits = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
        soft = {name: resource.getrlimit(kind)[0] for name, kind in limits.items()}
        rooms = [limit - sizes.get(name, 0) for name, limit in soft.items() if limit != resource.RLIM_INFINITY]
        return max(0, min(rooms)) if rooms else None

    def release_free_memory(self) -> None:
        """glibc keeps what large temporary arrays took."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def lower_thread_priority(by: int = 10) -> None:
    """Let the calling thread run when others do not want the core. Where threads have no priority, nothing happens."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), by)
