"""Frozen configuration. The dataclass defaults here are the only defaults in octavo.

Flags are generated from the fields (``args/engine_args.py``); ``field(metadata=...)`` carries the help text.
Each part of the engine receives only the config it needs. Knows nothing of files, hardware or HTTP.
"""

from octavo.config.chat import ChatConfig
from octavo.config.engine import (
    BackendConfig,
    CacheConfig,
    EngineConfig,
    LogprobsMode,
    ModelConfig,
    QueueConfig,
    SamplingConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    SupervisorConfig,
)
from octavo.config.kv_events import KVEventsConfig
from octavo.config.log import LogConfig
from octavo.config.server import ServerConfig
from octavo.config.tenants import TenantLimits, TenantTable

__all__ = ["BackendConfig", "CacheConfig", "ChatConfig", "EngineConfig", "LogConfig", "LogprobsMode", "ModelConfig"]
__all__ += [
    "KVEventsConfig",
    "QueueConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "SupervisorConfig",
]
__all__ += ["TenantLimits", "TenantTable"]
