"""Executors by name, resolved lazily, so that the engine core never imports a tensor library by itself."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.executor.base import Executor
from octavo.platforms.registry import make_platform
from octavo.utils.registry import resolve

EXECUTORS = {
    "uniproc": "octavo.executor.uniproc:UniprocExecutor",
}


def make_executor(config: EngineConfig) -> Executor:
    """The executor for ``config``: one process, one worker. Raises ConfigError or KernelError."""
    executor: Executor = resolve(EXECUTORS["uniproc"])(config, make_platform())
    return executor
