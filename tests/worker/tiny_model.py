"""A tiny random Llama on the reference backend: the real program, kernels and KV cache, in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo.backends.base import Limits, Runnable
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import BackendConfig
from octavo.messages import CachedRequestData, ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput
from octavo.models.families.llama import FAMILY
from octavo.quantization.base import Weight
from octavo.worker.model_runner import ModelRunner

VOCAB = 96
MAX_LEN = 64
BLOCK = 16
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters by program name."""
    rng = np.random.default_rng(seed)
    program = FAMILY.build(FAMILY.config(HF_CONFIG))
    arrays = {}
    for name, spec in program.weights.items():
        scale = 1.0 if len(spec.shape) == 1 else 2.0 * spec.shape[-1] ** -0.5
        arrays[name] = (scale * rng.standard_normal(spec.shape)).astype(np.float32)
    return arrays


def make_runnable(limits: Limits, arrays: dict[str, np.ndarray] | None = None) -> Runnable:
    arrays = random_weights() if arrays is None else arrays
    weights = {name: (Weight("float32", array.shape, array),) for name, array in arrays.items()}
    program = FAMILY.build(FAMILY.config(HF_CONFIG))
    return ReferenceBackend(BackendConfig(backend="reference")).prepare(program, weights, limits)


def make_runner(max_seqs: int = 16, prompt_rows: int = 128, arrays: dict[str, np.ndarray] | None = None) -> ModelRunner:
    limits = Limits(
        max_tokens=256,
        max_rows=max_seqs + prompt_rows,
        max_seqs=max_seqs,
        max_blocks_per_seq=MAX_LEN // BLOCK,
        num_blocks=1 + max_seqs * (MAX_LEN // BLOCK),
        block_size=BLOCK,
    )
    return ModelRunner(make_runnable(limits, arrays), limits, vocab_size=VOCAB, max_model_len=MAX_LEN)


def new_request(
    request_id: str,
    token_ids: list[int],
    params: SamplingParams,
    *,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    block_ids: list[int],
    **rest: object,
) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids,
        sampling_params=params,
        **rest,  # type: ignore[arg-type]
    )


def all_blocks(index: int) -> list[int]:
    """A disjoint whole block table for the ``index``-th request."""
    per_seq = MAX_LEN // BLOCK
    return list(range(1 + index * per_seq, 1 + (index + 1) * per_seq))


class Driver:
    """Makes the plans of simple schedules and gathers what comes back, per request."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.computed: dict[str, int] = {}
        self.outputs: list[ModelRunnerOutput] = []
        self._step = 0

    def step(
        self, scheduled: dict[str, int], new: list[NewRequestData] | None = None, **rest: object
    ) -> ModelRunnerOutput:
        """One plan: ``scheduled`` tokens for ``new`` and known requests."""
        new = new or []
        self.computed.update({request.request_id: request.num_computed_tokens for request in new})
        fresh = {request.request_id for request in new}
        plan = SchedulerOutput(
            step_id=self._step,
            num_scheduled_tokens=scheduled,
            new_requests=new,
            cached_requests=[
                CachedRequestData(request_id=r, num_computed_tokens=self.computed[r])
                for r in scheduled
                if r not in fresh
            ],
            **rest,  # type: ignore[arg-type]
        )
        self._step += 1
        output = self.runner.execute(plan)
        for request_id, count in scheduled.items():
            self.computed[request_id] += count
        self.outputs.append(output)
        return output

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs for t in output.sampled_token_ids.get(request_id, [])]

    def logprobs(self, request_id: str) -> list[object]:
        return [entry for output in self.outputs for entry in output.logprobs.get(request_id, [])]

    def prompt_logprobs(self, request_id: str) -> list[object]:
        return [entry for output in self.outputs for entry in output.prompt_logprobs.get(request_id, [])]


def save_checkpoint(folder: Path) -> Path:
    """The model of :func:`make_runnable` as a Hugging Face folder."""
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    tensors = {}
    config = FAMILY.config(HF_CONFIG)
    for name, array in random_weights().items():
        sources = FAMILY.weights.sources(name)
        heights = (config.q_size, config.kv_size, config.kv_size) if len(sources) == 3 else None
        parts = [array] if len(sources) == 1 else np.split(array, np.cumsum(heights)[:-1] if heights else 2)
        tensors.update({source: np.ascontiguousarray(part) for source, part in zip(sources, parts)})
    save_file(tensors, folder / "model.safetensors")
    return folder
