"""A tiny Llama with random weights and a tokenizer trained on the spot, for the real engine and reference backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.config import (
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

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 320, 32, 2, 4, 2, 8, 48
MAX_POSITION = 512
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CORPUS = ["the quick brown fox jumps over the lazy dog", "one small step for a man", "ein Zug fährt über die Brücke 🙂"]


def write_tokenizer(folder: Path, template: str = TEMPLATE, special_tokens: Sequence[str] = ()) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS, *special_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 0.3).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, str(folder / "model.safetensors"))


def make_config(model: str, *, kv_tokens: int = 2048, **changes: Any) -> EngineConfig:
    """The tiny model with room for ``kv_tokens`` tokens of KV; ``changes`` are fields of any section."""
    bytes_per_block = 16 * 2 * 4 * LAYERS * KV_HEADS * HEAD_DIM  # the reference backend keeps float32
    sections: dict[str, dict[str, Any]] = {
        "model": {"model": model, "served_model_name": "tiny"},
        "cache": {"kv_cache_memory": (kv_tokens // 16 + 1) * bytes_per_block},
        "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 128},
        "backend": {"backend": "reference", "threads": 1},
        "sampling": {},
        "queue": {},
        "supervisor": {},
        "structured_outputs": {},
    }
    classes = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "backend": BackendConfig,
        "sampling": SamplingConfig,
        "queue": QueueConfig,
        "supervisor": SupervisorConfig,
        "structured_outputs": StructuredOutputsConfig,
    }
    for name, value in changes.items():
        section = next(s for s, c in classes.items() if name in c.__dataclass_fields__)
        sections[section][name] = value
    return EngineConfig(**{name: classes[name](**fields) for name, fields in sections.items()})
