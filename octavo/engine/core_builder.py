"""Makes an EngineCore out of a resolved configuration that the model's header agrees with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.config import EngineConfig, ModelConfig
from octavo.engine.core import EngineCore, PhaseClock
from octavo.exceptions import ConfigError
from octavo.executor.base import Executor
from octavo.executor.factory import make_executor
from octavo.model_loader import ModelFacts, inspect_model


def build_core(
    config: EngineConfig,
    executor_factory: Callable[[EngineConfig], Executor] = make_executor,
    *,
    phases: PhaseClock | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> EngineCore:
    """Read the model's header, then load the model. ``options`` are those of EngineCore.

    Raises ConfigError, also where the configured length exceeds the model's positions, ModelError or KernelError.
    """
    phases = phases or PhaseClock(clock=clock)
    phases.begin("read model header")
    info = inspect_model(config.model.model, config.model)
    check_length(config.model, info)
    return EngineCore(config, executor_factory, vocab_size=info.vocab_size, phases=phases, clock=clock, **options)


def check_length(config: ModelConfig, info: ModelFacts) -> None:
    """Raises ConfigError if the configured length exceeds the model's positions."""
    wanted = config.max_model_len
    if wanted is not None and wanted > info.max_position:
        raise ConfigError(f"max_model_len = {wanted}: the model has only {info.max_position} positions")
