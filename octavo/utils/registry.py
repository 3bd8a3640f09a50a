"""Registries are literal dicts ``name -> "module:attribute"``; this resolves an entry."""

from __future__ import annotations

import importlib
from typing import Any


def resolve(target: str) -> Any:
    """The object at ``"package.module:attribute"``. Raises ImportError or AttributeError."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
