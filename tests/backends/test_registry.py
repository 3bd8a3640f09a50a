"""Backends by name."""

from __future__ import annotations

import pytest

from octavo.backends.registry import make_backend
from octavo.config import BackendConfig
from octavo.config.choices import BACKENDS
from octavo.exceptions import KernelError


def test_a_backend_that_was_not_built_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a folder of sources hides the installed package."""
    monkeypatch.setitem(BACKENDS, "cpu", "octavo.backends.not_built:Backend")
    with pytest.raises(KernelError, match=r"cpu backend is not built: .*another folder"):
        make_backend(BackendConfig(backend="auto"))
