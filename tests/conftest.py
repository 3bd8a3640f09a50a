"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Path of the default model's GGUF file, fetched into the ordinary cache the first time."""
    from octavo.catalog import resolve_model

    return resolve_model("smollm2-135m", None, None)
