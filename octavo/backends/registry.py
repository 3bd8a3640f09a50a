"""Backends by name, resolved lazily."""

from __future__ import annotations

from octavo.backends.base import Backend
from octavo.config import BackendConfig
from octavo.exceptions import ConfigError, KernelError
from octavo.utils.registry import resolve

BACKENDS = {
    "cpu": "octavo.backends.cpu.backend:CpuBackend",
    "reference": "octavo.backends.reference.backend:ReferenceBackend",
}


def make_backend(config: BackendConfig) -> Backend:
    """The backend ``config`` asks for; ``auto`` is the CPU backend.

    Raises ConfigError for an unknown name, KernelError for a backend that cannot run here.
    """
    name = "cpu" if config.backend == "auto" else config.backend
    if name not in BACKENDS:
        raise ConfigError(f"backend = {name!r}: must be one of {sorted(BACKENDS)}")
    try:
        make = resolve(BACKENDS[name])
    except ImportError as error:
        raise KernelError(
            f"the {name} backend is not built: {error}. Sources in the current folder hide an installed octavo: "
            "run from another folder, or install with pip install -e ."
        ) from error
    backend: Backend = make(config)
    return backend
