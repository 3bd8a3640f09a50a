"""Frozen structs: all that the front end, the engine core and the workers say to each other.

Plain Python values only (no numpy, no torch), so that each message can cross a process border as msgpack.
"""

from octavo.messages.beam_search import BeamSearchParams
from octavo.messages.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
)
from octavo.messages.fault import RequestFault
from octavo.messages.kv_cache import KVCacheSpec
from octavo.messages.kv_transfer import KVMove, KVTierInfo, KVTierReport, KVTierStats, KVTraffic
from octavo.messages.sampling_params import (
    BeamSearch,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    ThinkingTokens,
)
from octavo.messages.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from octavo.messages.structured_outputs import StructuredOutputsParams
from octavo.messages.tenant import Tenant

__all__ = [
    "BeamSearch",
    "BeamSearchParams",
    "CachedRequestData",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineInfo",
    "FinishReason",
    "KVCacheSpec",
    "KVMove",
    "KVTierInfo",
    "KVTierReport",
    "KVTierStats",
    "KVTraffic",
    "ModelRunnerOutput",
    "NewRequestData",
    "RepetitionDetectionParams",
    "RequestFault",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerOutput",
    "SchedulerStats",
    "StructuredOutputsParams",
    "Tenant",
    "ThinkingTokens",
    "TokenLogprobs",
]
