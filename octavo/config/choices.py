"""What can be chosen by name, each choice written once: flags, their help, checks and factories read these tables.

A table's values are ``"module:attribute"``, imported by the factory only when chosen (``utils.registry.resolve``). So a
new policy, index, backend, drafter, publisher or parser is one file, and one line here.
"""

from __future__ import annotations

from typing import Literal

Dtype = Literal["auto", "bfloat16", "float32"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
KVDtype = Literal["auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"]  # auto: the backend's own

KV_CACHE_DTYPES: dict[str, KVDtype] = {
    "auto": "auto",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
PREFIX_INDEXES = {
    "hash": "octavo.core.kv_cache.hash_index:HashIndex",
    "radix": "octavo.core.kv_cache.radix_index:RadixIndex",
}
SCHEDULING_POLICIES = {
    "fcfs": "octavo.core.policy:FcfsPolicy",
    "priority": "octavo.core.priority:PriorityPolicy",
    "fair": "octavo.core.fair:FairPolicy",
}
BACKENDS = {
    "cpu": "octavo.backends.cpu.backend:CpuBackend",
    "reference": "octavo.backends.reference.backend:ReferenceBackend",
}
DRAFTERS = {
    "ngram": "octavo.worker.spec_decode.methods.ngram:NgramDrafter",
}
KV_EVENT_PUBLISHERS = {
    "null": "octavo.engine.kv_events:NullPublisher",
    "zmq": "octavo.engine.kv_events.zmq_publisher:ZmqPublisher",
}
TOOL_PARSERS = {
    "hermes": "octavo.entrypoints.chat.parsers.hermes:FORMAT",
    "llama3_json": "octavo.entrypoints.chat.parsers.llama3_json:FORMAT",
    "mistral": "octavo.entrypoints.chat.parsers.mistral:FORMAT",
    "qwen3_coder": "octavo.entrypoints.chat.parsers.qwen3_coder:FORMAT",
}
TOOL_PARSER_ALIASES = {"qwen3_xml": "qwen3_coder"}
REASONING_PARSERS = {
    "qwen3": "octavo.entrypoints.chat.parsers.think:FORMAT",
    "deepseek_r1": "octavo.entrypoints.chat.parsers.think:FORMAT",
    "mistral": "octavo.entrypoints.chat.parsers.think:MISTRAL",
}
