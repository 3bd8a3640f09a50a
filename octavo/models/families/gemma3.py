"""Gemma 3, text: most layers slide, with a rotary base of their own; norms before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.exceptions import UnsupportedModel
from octavo.models.family import Family, WeightMap
from octavo.models.parts import (
    DECODER_WEIGHTS,
    DecoderConfig,
    builder,
    decoder_fields,
    finish,
    qk_normed_attention,
    read,
    read_full_layers,
    read_positive,
    read_rope,
    read_size,
    read_window,
)
from octavo.program import Program, Rope

_DEFAULTS = {  # transformers' own, for what config.json may leave out
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """``rope`` is that of full layers, ``local_rope`` that of sliding ones; ``scale`` multiplies q . k."""

    local_rope: Rope
    scale: float

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Gemma3Config:
        """From config.json. Raises FormatError or UnsupportedModel."""
        hf = {**_DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if hf.get(key):
                raise UnsupportedModel(f"{key} = {hf[key]!r:.80}: must be absent")
        if read(hf, "attention_bias", bool, False):
            raise UnsupportedModel("attention_bias = True: must be false")
        ropes = read(hf, "rope_parameters", dict, {})
        local = {"rope_theta": read_positive(hf, "rope_local_base_freq", 10000.0)}
        if "full_attention" in ropes:  # transformers 5
            local = read(ropes, "sliding_attention", dict, local)
            hf |= {"rope_parameters": read(ropes, "full_attention", dict)}
        fields = decoder_fields(hf, activation="gelu_pytorch_tanh")
        pattern = read_size(hf, "sliding_window_pattern", 6)
        return cls(
            **fields,
            window=read_window(hf),
            full_layers=read_full_layers(hf, range(pattern - 1, fields["num_layers"], pattern)),
            local_rope=read_rope({"rope_parameters": local}, fields["head_dim"], fields["max_position"]),
            scale=read_positive(hf, "query_pre_attn_scalar", float(fields["head_dim"])) ** -0.5,
        )


def build(c: Gemma3Config) -> Program:
    """T tokens of any mix of requests, R rows that need logits."""
    b = builder(c)
    x = b.embed(b.token_ids, "embed_tokens", c.hidden_size, scale=c.hidden_size**0.5)  # [T, hidden]
    for layer in range(c.num_layers):
        name, eps = f"layers.{layer}", c.rms_norm_eps
        rope = c.rope if layer in c.full_layers else c.local_rope
        h = b.rms_norm(x, f"{name}.input_norm", eps)
        a = qk_normed_attention(b, h, c, layer, rope=rope, scale=c.scale)
        x = b.add(x, b.rms_norm(a, f"{name}.post_attention_norm", eps))
        h = b.rms_norm(x, f"{name}.pre_mlp_norm", eps)
        gate_up = b.linear(h, f"{name}.gate_up", 2 * c.intermediate_size)
        h = b.linear(b.gelu_mul(gate_up), f"{name}.down", c.hidden_size)
        x = b.add(x, b.rms_norm(h, f"{name}.post_mlp_norm", eps))
    return finish(b, x, c)


_NORMS = {
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
    "layers.{i}.input_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.pre_mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
    "norm": "model.norm",
}
WEIGHTS = WeightMap(
    modules={**DECODER_WEIGHTS.modules, **{name: (module,) for name, module in _NORMS.items()}},
    tied=DECODER_WEIGHTS.tied,
    ignored=DECODER_WEIGHTS.ignored,
    plus_one=frozenset(_NORMS),
)
FAMILY = Family(config=Gemma3Config.from_hf, build=build, weights=WEIGHTS)
