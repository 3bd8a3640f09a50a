"""Frozen configuration. The dataclass defaults here are the only defaults in octavo.

Flags are generated from the fields (``args/engine_args.py``); ``field(metadata=...)`` carries the help text.
Each part of the engine receives only the config it needs. Knows nothing of files, hardware or HTTP.
"""

from octavo.config.chat import ChatConfig
from octavo.config.choices import Dtype, KVDtype, LogprobsMode
from octavo.config.engine import (
    BackendConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    QueueConfig,
    SamplingConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    SupervisorConfig,
)
from octavo.config.kv_events import KVEventsConfig
from octavo.config.log import LogConfig
from octavo.config.server import ServerConfig
from octavo.config.speculative import SpeculativeConfig
from octavo.config.tenants import TenantLimits, TenantTable

__all__ = [
    "BackendConfig",
    "CacheConfig",
    "ChatConfig",
    "Dtype",
    "EngineConfig",
    "KVDtype",
    "KVEventsConfig",
    "LogConfig",
    "LogprobsMode",
    "ModelConfig",
    "QueueConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "SupervisorConfig",
    "TenantLimits",
    "TenantTable",
]
