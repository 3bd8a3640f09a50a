"""From what the user wrote to what the engine needs: a local path, a name for the API, a number of threads.

Knows nothing of flags; knows the catalogue and the hardware. The KV cache's size is left to the executor, which
knows what the weights left over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from octavo.catalog import cache_root, resolve_model
from octavo.config import EngineConfig
from octavo.platforms.registry import make_platform

Progress = Callable[[str, int, int], None]  # (what is being fetched, bytes so far, bytes in all)


def resolve_engine_config(
    config: EngineConfig, progress: Progress | None = None, *, weights: bool = True
) -> EngineConfig:
    """``config`` with a local model path, ``served_model_name`` and ``threads`` filled in; downloads when needed.

    Applying it twice changes nothing more; ``weights``: see ``resolve_model``. Raises ModelNotFound, and FormatError
    when a download is damaged.
    """
    model = config.model
    path = resolve_model(model.model, model.cache_dir, progress, weights=weights)
    model = dataclasses.replace(model, model=path, served_model_name=model.served_model_name or model.model)
    threads = config.backend.threads or make_platform().num_threads()
    folder = config.backend.weights_cache_dir or str(cache_root(model.cache_dir) / "packed")
    backend = dataclasses.replace(
        config.backend, threads=threads, weights_cache_dir=folder if config.backend.weights_cache else None
    )
    return dataclasses.replace(config, model=model, backend=backend)
