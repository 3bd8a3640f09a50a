"""What the model itself bounds: the context length and the width of the vocabulary. Reads headers, not weights."""

from __future__ import annotations

import dataclasses

from octavo.config import EngineConfig
from octavo.exceptions import ConfigError
from octavo.model_loader import inspect_model


def apply_model_limits(config: EngineConfig) -> tuple[EngineConfig, int]:
    """``config`` with ``max_model_len`` set, and the width of the logits.

    Raises ConfigError if the configured length exceeds the model's positions, ModelError if it cannot be read.
    """
    info = inspect_model(config.model.model, config.model)
    wanted = config.model.max_model_len
    if wanted is not None and wanted > info.max_position:
        raise ConfigError(f"max_model_len = {wanted}: the model has only {info.max_position} positions")
    model = dataclasses.replace(config.model, max_model_len=wanted or info.max_position)
    return dataclasses.replace(config, model=model), info.vocab_size
