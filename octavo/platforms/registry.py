"""Platforms by name, resolved lazily."""

from __future__ import annotations

from octavo.platforms.base import Platform
from octavo.utils.registry import resolve

PLATFORMS = {"cpu": "octavo.platforms.cpu:CpuPlatform"}


def make_platform(name: str = "cpu") -> Platform:
    """The platform ``name``, a key of PLATFORMS."""
    platform: Platform = resolve(PLATFORMS[name])()
    return platform
