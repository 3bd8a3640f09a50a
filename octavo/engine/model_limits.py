"""What the model itself bounds: the context length and the width of the vocabulary. Reads headers, not weights."""

from __future__ import annotations

from octavo.config import EngineConfig, ModelConfig
from octavo.exceptions import ConfigError
from octavo.model_loader import ModelInfo, inspect_model


def check_model_limits(config: EngineConfig) -> int:
    """The width of the logits. Raises as :func:`check_length`, and ModelError if the model cannot be read."""
    info = inspect_model(config.model.model, config.model)
    check_length(config.model, info)
    return info.vocab_size


def check_length(config: ModelConfig, info: ModelInfo) -> None:
    """Raises ConfigError if the configured length exceeds the model's positions."""
    wanted = config.max_model_len
    if wanted is not None and wanted > info.max_position:
        raise ConfigError(f"max_model_len = {wanted}: the model has only {info.max_position} positions")
