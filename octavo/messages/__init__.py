"""Frozen structs: all that the front end, the engine core and the workers say to each other.

Plain Python values only (no numpy, no torch), so that each message can cross a process border as msgpack.
"""

from octavo.messages.beam_search import BeamSearchParams
from octavo.messages.cache import (
    CacheMiss,
    CacheOrder,
    CachePin,
    CacheReply,
    EvictPrefixes,
    ListPrefixes,
    PinInfo,
    PrefixInfo,
    RemovePin,
    ResetCache,
    RestorePrefix,
    SavePrefixes,
    SetPin,
)
from octavo.messages.engine import (
    CacheUse,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    QueueTimes,
    SchedulerStats,
    TokenLogprobs,
)
from octavo.messages.fault import RequestFault
from octavo.messages.kv_cache import FULL, KVCacheSpec, KVSpec, blocks_at_once, max_tokens_that_fit
from octavo.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from octavo.messages.kv_transfer import KVMove, KVTierInfo, KVTierReport, KVTierStats, KVTraffic
from octavo.messages.memory import MemoryPlan
from octavo.messages.request_options import CacheOptions, OutputOptions, SchedulingOptions, Tenant
from octavo.messages.sampling_params import (
    BeamSearch,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    ThinkingTokens,
)
from octavo.messages.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from octavo.messages.structured_outputs import StructuredOutputsParams

__all__ = [
    "FULL",
    "AllBlocksCleared",
    "BeamSearch",
    "BeamSearchParams",
    "BlockRemoved",
    "BlockStored",
    "CacheMiss",
    "CacheOptions",
    "CacheOrder",
    "CachePin",
    "CacheReply",
    "CacheUse",
    "CachedRequestData",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineInfo",
    "EvictPrefixes",
    "FinishReason",
    "KVCacheSpec",
    "KVEvent",
    "KVEventBatch",
    "KVMove",
    "KVSpec",
    "KVTierInfo",
    "KVTierReport",
    "KVTierStats",
    "KVTraffic",
    "ListPrefixes",
    "MemoryPlan",
    "ModelRunnerOutput",
    "NewRequestData",
    "OutputOptions",
    "PinInfo",
    "PrefixInfo",
    "QueueTimes",
    "RemovePin",
    "RepetitionDetectionParams",
    "RequestFault",
    "RequestOutputKind",
    "ResetCache",
    "RestorePrefix",
    "SamplingParams",
    "SavePrefixes",
    "SchedulerOutput",
    "SchedulerStats",
    "SchedulingOptions",
    "SetPin",
    "StructuredOutputsParams",
    "Tenant",
    "ThinkingTokens",
    "TokenLogprobs",
    "blocks_at_once",
    "max_tokens_that_fit",
]
