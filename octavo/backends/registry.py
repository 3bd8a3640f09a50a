"""Backends by name, resolved lazily."""

from __future__ import annotations

from octavo.backends.base import Backend
from octavo.config import BackendConfig
from octavo.exceptions import ConfigError
from octavo.utils.registry import resolve

BACKENDS = {
    "cpu": "octavo.backends.cpu.backend:CpuBackend",
    "reference": "octavo.backends.reference.backend:ReferenceBackend",
}


def make_backend(config: BackendConfig) -> Backend:
    """The backend ``config`` asks for; ``auto`` is the CPU backend. Raises ConfigError for an unknown name."""
    name = "cpu" if config.backend == "auto" else config.backend
    if name not in BACKENDS:
        raise ConfigError(f"backend = {name!r}: must be one of {sorted(BACKENDS)}")
    backend: Backend = resolve(BACKENDS[name])(config)
    return backend
