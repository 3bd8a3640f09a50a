"""``system_fingerprint``: two answers with equal fingerprints, from equal requests, are equal to the last bit."""

from __future__ import annotations

import hashlib
import os

import octavo
from octavo.config import EngineConfig
from octavo.messages import EngineInfo


def fingerprint(config: EngineConfig, info: EngineInfo) -> str:
    """A short hash of all that decides an answer: octavo, the model, its weights' format, the kernels, the KV type.

    Threads, batch sizes and cache sizes do not: they never change an answer.
    """
    parts = (
        octavo.__version__,
        os.path.basename(config.model.model.rstrip("/")),
        config.model.dtype,
        config.cache.kv_dtype,
        info.facts.get("weights", ""),
        info.facts.get("kernels", "").partition(",")[0],
    )
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
