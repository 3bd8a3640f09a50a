"""Makes the backend of a name."""

from __future__ import annotations

from octavo.backends.base import Backend
from octavo.config import BackendConfig
from octavo.config.choices import BACKENDS
from octavo.exceptions import KernelError
from octavo.utils.registry import resolve


def make_backend(config: BackendConfig) -> Backend:
    """The backend ``config`` asks for; ``auto`` is the CPU backend.

    Raises KernelError for a backend that cannot run here.
    """
    name = "cpu" if config.backend == "auto" else config.backend
    try:
        make = resolve(BACKENDS[name])
    except ImportError as error:
        raise KernelError(
            f"the {name} backend is not built: {error}. Sources in the current folder hide an installed octavo: "
            "run from another folder, or install with pip install -e ."
        ) from error
    backend: Backend = make(config)
    return backend
