"""Tiny random checkpoints made with transformers, and running a loaded model on chosen steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from octavo.backends.base import Backend, Limits, Runnable, StepInputs, StepOutputs
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import BackendConfig
from octavo.model_loader import LoadedModel

torch.set_num_threads(1)
BLOCK_SIZE, NUM_BLOCKS = 16, 16
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def save(folder: Path, kind: str = "Llama", *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A random ``{kind}ForCausalLM`` in ``folder``; returns it, as float32 values."""
    torch.manual_seed(11)
    make = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(make(**(SIZES | config))).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms are ones and biases zeros at first: make them matter
            parameter.data = torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0)
    model.to(dtype).save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """transformers' logits [len(token_ids), vocab] in float32."""
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def prepare(loaded: LoadedModel, dtype: type[np.floating] = np.float32, backend: Backend | None = None) -> Runnable:
    """On ``backend``, or the reference in ``dtype``."""
    groups = len(loaded.program.kv_groups)
    limits = Limits(
        max_tokens=256,
        max_rows=256,
        max_seqs=4,
        max_blocks_per_seq=NUM_BLOCKS - 1,
        num_blocks=NUM_BLOCKS * groups,
        block_size=BLOCK_SIZE,
    )
    backend = backend or ReferenceBackend(BackendConfig(), dtype)
    return backend.prepare(loaded.program, loaded.weights, limits)


@dataclass
class Sequence:
    """A request as the worker sees it: its tokens, its blocks, and how much of it is computed."""

    token_ids: list[int]
    blocks: list[int]
    computed: int = 0


def step(runnable: Runnable, work: list[tuple[Sequence, int]]) -> list[np.ndarray]:
    """Run the next ``count`` tokens of each sequence in one step; logits [count, vocab] of each."""
    logits = step_outputs(runnable, work).rows("logits")
    return np.split(np.array(logits), np.cumsum([count for _, count in work])[:-1])


def step_outputs(runnable: Runnable, work: list[tuple[Sequence, int]]) -> StepOutputs:
    """The same; outputs of all tokens, one sequence after the other.

    The blocks of a sequence are those of its first KV group; each other one has as many behind.
    """
    groups = range(runnable.limits.num_blocks // NUM_BLOCKS)  # type: ignore[attr-defined]
    ids, positions, slots, starts = [], [], [], [0]
    for sequence, count in work:
        for position in range(sequence.computed, sequence.computed + count):
            ids.append(sequence.token_ids[position])
            positions.append(position)
            slots.append(sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        sequence.computed += count
        starts.append(len(ids))
    width = max(len(sequence.blocks) for sequence, _ in work)
    tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in work]
    tables = [[block + group * NUM_BLOCKS for block in table] for group in groups for table in tables]
    slots = [slot + group * NUM_BLOCKS * BLOCK_SIZE for group in groups for slot in slots]
    arrays = (ids, positions, slots, starts, [s.computed for s, _ in work], tables, list(range(len(ids))))
    return runnable.run(StepInputs(*(np.array(a, dtype=np.int32) for a in arrays)))


def random_ids(count: int, vocab: int = 96, seed: int = 5) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, size=count)]
