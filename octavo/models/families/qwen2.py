"""Qwen2 and Qwen2.5: a Llama-shaped decoder whose Q, K and V projections have biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.models.family import Family
from octavo.models.parts import (
    DECODER_WEIGHTS,
    DecoderConfig,
    attention,
    builder,
    decoder_fields,
    finish,
    read,
    read_full_layers,
    read_window,
    swiglu,
)
from octavo.program import Program


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Qwen2 adds no fields."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen2Config:
        """From config.json. ``sliding_window`` counts only with ``use_sliding_window``. Raises ModelError."""
        window = read_window(hf) if read(hf, "use_sliding_window", bool, False) else None
        full = read_full_layers(hf, range(read(hf, "max_window_layers", int, 28)))
        return cls(**decoder_fields(hf), window=window, full_layers=full)


def build(c: Qwen2Config) -> Program:
    """T tokens of any mix of requests, R rows that need logits."""
    b = builder(c)
    x = b.embed(b.token_ids, "embed_tokens", c.hidden_size)  # [T, hidden]
    for layer in range(c.num_layers):
        h = b.rms_norm(x, f"layers.{layer}.input_norm", c.rms_norm_eps)
        x = b.add(x, attention(b, h, c, layer, qkv_bias=True, o_bias=False))
        h = b.rms_norm(x, f"layers.{layer}.post_attention_norm", c.rms_norm_eps)
        x = b.add(x, swiglu(b, h, c, layer))
    return finish(b, x, c)


FAMILY = Family(config=Qwen2Config.from_hf, build=build, weights=DECODER_WEIGHTS)
