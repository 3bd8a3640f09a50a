"""What code computes K and V: changed code may compute other bits, and keep them in another order."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGES = ("backends", "models", "program")


@cache
def code_identity() -> str:
    """SHA-256, as hex, of octavo's kernels, model families and programs, native modules included."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".so", ".pyd"):
                digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
