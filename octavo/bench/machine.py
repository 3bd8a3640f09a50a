"""Facts that a figure is worth nothing without: machine, versions, commit. Nothing that names a person or a host."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import octavo
from octavo.platforms.cpu import CpuPlatform, meminfo, usable_cpus

PACKAGES = ("numpy", "uvicorn", "uvloop", "httptools", "tokenizers", "msgspec")


def machine_facts() -> dict[str, Any]:
    """CPU, cores, memory (bytes), load average, kernel, Python, package versions, git commit, time (UTC)."""
    versions = {"octavo": octavo.__version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": CpuPlatform().device_name(),
        "logical_cpus": len(usable_cpus()),
        "physical_cores": CpuPlatform().num_threads(),
        "memory_bytes": meminfo().get("MemTotal"),
        "load_average_1m": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """The commit of the source tree, with ``-dirty`` if files differ from it; None outside one."""
    folder = Path(octavo.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
