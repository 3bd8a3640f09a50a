"""What KV of 8 bits costs: SmolLM2's answers beside those with bfloat16 KV."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import Limits, StepInputs
from octavo.backends.registry import make_backend
from octavo.config import BackendConfig, KVDtype, ModelConfig
from octavo.model_loader import load_model
from octavo.tokenizer import load_tokenizer
from tests.models.test_smollm2 import TEXT

COUNT = 200
# least agreement of the most probable token, most mean difference of the next token's logprob
LOSSES: dict[KVDtype, tuple[float, float]] = {
    "int8": (0.97, 0.05),
    "fp8_e4m3": (0.9, 0.15),
    "fp8_e5m2": (0.8, 0.3),
}


@pytest.mark.parametrize("small", LOSSES)
def test_small_kv_agrees_with_bfloat16_kv(smollm2_path: str, small: KVDtype) -> None:
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
        logits = runnable.run(inputs).rows("logits").astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    exact, rounded = logprobs("bfloat16"), logprobs(small)
    agreement = (exact.argmax(axis=1) == rounded.argmax(axis=1)).mean()
    difference = np.abs((exact - rounded)[every[:-1], tokens[1:]]).mean()
    least, most = LOSSES[small]
    assert agreement >= least
    assert 1e-4 < difference < most, "at least, or it was not used"
