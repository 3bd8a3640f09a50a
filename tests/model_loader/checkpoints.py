"""GGUF files with the same tensors as a HF checkpoint, written as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.formats.gguf_writer import write_gguf

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NORMS = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, arch: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    names = LAYER | GEMMA_NORMS if arch == "gemma3" else LAYER
    return f"blk.{layer}.{names[rest]}.{kind}"


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """The order of Q and K rows in files of the llama architecture."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def metadata(config: Any, arch: str) -> dict[str, Any]:
    rope, window = config.rope_parameters, {}
    if arch == "gemma3":
        rope = rope["full_attention"]
        window = {f"{arch}.attention.sliding_window": config.sliding_window}
    return window | {
        "general.architecture": arch,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
    }


def tensors(model: Any, arch: str, type: str) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Matrices as ``type``, vectors as F32."""
    config, out = model.config, {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == "llama" and (count := heads.get(name.split(".")[-2])):
            array = interleave(array, count)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        kind = type if array.ndim == 2 else "F32"
        raw = gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType[kind])
        out[gguf_name(name, arch)] = (array.shape, kind, raw.tobytes())
    return out


def write(path: Path, model: Any, arch: str, type: str, extra: dict[str, Any] | None = None) -> Path:
    return write_gguf(path, metadata(model.config, arch) | (extra or {}), tensors(model, arch, type))
