"""Llama 1 to 3.x, and what shares its shape: Mistral, SmolLM2, TinyLlama. Dense decoders with GQA and SwiGLU."""

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
    read_window,
    swiglu,
)
from octavo.program import Program


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """``attention_bias``: biases of Q, K, V and O; ``mlp_bias``: of gate, up and down."""

    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> LlamaConfig:
        """From config.json. Raises FormatError or UnsupportedModel."""
        return cls(
            **decoder_fields(hf),
            window=read_window(hf),
            attention_bias=read(hf, "attention_bias", bool, False),
            mlp_bias=read(hf, "mlp_bias", bool, False),
        )


def build(c: LlamaConfig) -> Program:
    """T tokens of any mix of requests, R rows that need logits."""
    b = builder(c)
    x = b.embed(b.token_ids, "embed_tokens", c.hidden_size)  # [T, hidden]
    for layer in range(c.num_layers):
        h = b.rms_norm(x, f"layers.{layer}.input_norm", c.rms_norm_eps)
        x = b.add(x, attention(b, h, c, layer, qkv_bias=c.attention_bias, o_bias=c.attention_bias))
        h = b.rms_norm(x, f"layers.{layer}.post_attention_norm", c.rms_norm_eps)
        x = b.add(x, swiglu(b, h, c, layer, bias=c.mlp_bias))
    return finish(b, x, c)


FAMILY = Family(config=LlamaConfig.from_hf, build=build, weights=DECODER_WEIGHTS)
