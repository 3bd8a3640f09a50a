"""What int8 KV costs: SmolLM2's answers beside those with bfloat16 KV."""

from __future__ import annotations

import numpy as np

from octavo.backends.base import KVDtype, Limits, StepInputs
from octavo.backends.registry import make_backend
from octavo.config import BackendConfig, ModelConfig
from octavo.model_loader import load_model
from octavo.tokenizer import load_tokenizer
from tests.models.test_smollm2 import TEXT

COUNT = 200


def test_int8_kv_agrees_with_bfloat16_kv(smollm2_path: str) -> None:
    loaded = load_model(ModelConfig(model=smollm2_path))
    tokens = np.array(load_tokenizer(smollm2_path).encode(TEXT, add_special_tokens=False)[:COUNT], np.int32)
    every = np.arange(COUNT, dtype=np.int32)
    inputs = StepInputs(
        token_ids=tokens,
        positions=every,
        slot_mapping=every + 16,
        query_start_loc=np.array([0, COUNT], np.int32),
        seq_lens=np.array([COUNT], np.int32),
        block_tables=np.arange(1, 14, dtype=np.int32)[None],
        logit_rows=every,
    )

    def logprobs(kv: KVDtype) -> np.ndarray:
        limits = Limits(COUNT, COUNT, 1, 13, 14, 16, kv)
        runnable = make_backend(BackendConfig(threads=1)).prepare(loaded.program, loaded.weights, limits)
        logits = runnable.run(inputs).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    exact, int8 = logprobs("bfloat16"), logprobs("int8")
    agreement = (exact.argmax(axis=1) == int8.argmax(axis=1)).mean()
    difference = np.abs((exact - int8)[every[:-1], tokens[1:]])
    assert agreement >= 0.97
    assert difference.mean() < 0.05
    assert difference.mean() > 1e-4, "int8 was not used"
