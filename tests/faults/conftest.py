"""The tiny model, for engines and servers that are about to be hurt."""

from __future__ import annotations

from tests.engine.conftest import tiny_model

__all__ = ["tiny_model"]
