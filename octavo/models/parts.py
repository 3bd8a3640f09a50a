"""Blocks and readers that several families share. On a block's third boolean, write a plain file instead.

Knows HF config keys (transformers 4 and 5) and no checkpoint bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.exceptions import FormatError, UnsupportedModel
from octavo.models.family import WeightMap
from octavo.program import Program, ProgramBuilder, Rope, Value

HF = Mapping[str, Any]
_MISSING: Any = object()
_MAX_HEAD_DIM = 4096  # a table of frequencies is made before the config is compared with the tensors


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a pre-norm decoder with rotary embedding; the fields every such family has."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope
    window: int | None = None  # tokens that a token sees at most in a layer that slides, itself included
    full_layers: Collection[int] = ()  # those that do not slide

    def window_of(self, layer: int) -> int | None:
        """The sliding window of ``layer``; None: its tokens see all before them."""
        return None if layer in self.full_layers else self.window

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


DECODER_WEIGHTS = WeightMap(
    modules={
        "embed_tokens": ("model.embed_tokens",),
        "layers.{i}.input_norm": ("model.layers.{i}.input_layernorm",),
        "layers.{i}.qkv": tuple(f"model.layers.{{i}}.self_attn.{p}_proj" for p in "qkv"),
        "layers.{i}.o": ("model.layers.{i}.self_attn.o_proj",),
        "layers.{i}.post_attention_norm": ("model.layers.{i}.post_attention_layernorm",),
        "layers.{i}.gate_up": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
        "layers.{i}.down": ("model.layers.{i}.mlp.down_proj",),
        "norm": ("model.norm",),
        "lm_head": ("lm_head",),
    },
    tied={"lm_head": "embed_tokens"},
    ignored=(r".*\.rotary_emb\.inv_freq",),
)


def builder(c: DecoderConfig) -> ProgramBuilder:
    """An empty program of the sizes of ``c``."""
    return ProgramBuilder(vocab_size=c.vocab_size, max_position=c.max_position)


def finish(b: ProgramBuilder, x: Value, c: DecoderConfig) -> Program:
    """The last norm and the head after the layers, x [T, hidden]. Outputs: logits [R, vocab], hidden [T, hidden]."""
    rows = b.rms_norm(b.rows(x, b.logit_rows), "norm", c.rms_norm_eps)  # [R, hidden]
    logits = b.linear(rows, "lm_head", c.vocab_size)
    return b.finish(logits=logits, hidden=b.rms_norm(x, "norm", c.rms_norm_eps))


def read(hf: HF, key: str, kind: type, default: Any = _MISSING) -> Any:
    """``hf[key]``, checked to be a ``kind`` (an int passes for float). Raises FormatError naming the key."""
    value = hf.get(key)
    if value is None:
        if default is _MISSING:
            raise FormatError("config", "missing", key=key)
        return default
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind:
        raise FormatError("config", f"{value!r:.80} is not of type {kind.__name__}", key=key)
    return value


def read_size(hf: HF, key: str, default: Any = _MISSING, *, most: int = 2**31 - 1) -> int:
    """A positive integer of the config, ``most`` at most."""
    value: int = read(hf, key, int, default)
    if not 1 <= value <= most:
        raise FormatError("config", f"{value!r:.80} is not in 1..{most}", key=key)
    return value


def read_positive(hf: HF, key: str, default: Any = _MISSING) -> float:
    """A positive, finite number of the config."""
    value: float = read(hf, key, float, default)
    if not 0 < value < math.inf:
        raise FormatError("config", f"{value} is not a positive number", key=key)
    return value


def read_window(hf: HF) -> int | None:
    """``sliding_window``, or None if there is none."""
    return None if hf.get("sliding_window") is None else read_size(hf, "sliding_window")


def read_full_layers(hf: HF, default: Collection[int]) -> Collection[int]:
    """Layers whose attention is full by ``layer_types``, or ``default`` where that is missing."""
    types = read(hf, "layer_types", list, [])
    if not types:
        return default
    if len(types) != read_size(hf, "num_hidden_layers"):
        raise FormatError("config", f"{len(types)} types of {hf['num_hidden_layers']} layers", key="layer_types")
    if unknown := [one for one in types if one not in ("full_attention", "sliding_attention")]:
        raise UnsupportedModel(f"layer_types: {unknown[0]!r:.80} is neither full_attention nor sliding_attention")
    return frozenset(layer for layer, one in enumerate(types) if one == "full_attention")


def decoder_fields(hf: HF, *, activation: str = "silu") -> dict[str, Any]:
    """The fields of DecoderConfig, all layers full. ``activation`` is that of the family's MLP.

    Raises FormatError, or UnsupportedModel for activations and rope types octavo lacks.
    """
    key = "hidden_act" if "hidden_act" in hf else "hidden_activation"
    if (act := read(hf, key, str, activation)) != activation:
        raise UnsupportedModel(f"{key} = {act!r}: only {activation!r} is supported")
    hidden, heads = read_size(hf, "hidden_size"), read_size(hf, "num_attention_heads")
    head_dim = read_size(hf, "head_dim", hidden // heads, most=_MAX_HEAD_DIM)
    kv_heads = read_size(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise FormatError("config", f"{kv_heads} KV heads do not divide {heads} heads", key="num_key_value_heads")
    max_position = read_size(hf, "max_position_embeddings", 2048)
    return {
        "hidden_size": hidden,
        "intermediate_size": read_size(hf, "intermediate_size"),
        "num_layers": read_size(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": read_size(hf, "vocab_size"),
        "max_position": max_position,
        "rms_norm_eps": read_positive(hf, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": read(hf, "tie_word_embeddings", bool, False),
        "rope": read_rope(hf, head_dim, max_position),
    }


def read_rope(hf: HF, head_dim: int, max_position: int) -> Rope:
    """Rotary frequencies from ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``.

    Types: default, linear, llama3, yarn, and ``frequency_factors`` (GGUF's rope_freqs tensor). Raises UnsupportedModel.
    """
    parameters = dict(read(hf, "rope_scaling", dict, {})) | dict(read(hf, "rope_parameters", dict, {}))
    kind = read(parameters, "rope_type", str, read(parameters, "type", str, "default"))
    if kind not in _ROPE_TYPES:
        raise UnsupportedModel(f"rope_type = {kind!r}: must be one of {', '.join(sorted(_ROPE_TYPES))}")
    theta = read_positive(parameters, "rope_theta", read_positive(hf, "rope_theta", 10000.0))
    partial = read_positive(parameters, "partial_rotary_factor", read_positive(hf, "partial_rotary_factor", 1.0))
    rotary_dim = round(head_dim * min(partial, 2.0))
    if theta <= 1.0 or rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise FormatError(
            "config", f"rope theta {theta}, {rotary_dim} of {head_dim} elements rotated", key="rope_theta"
        )
    plain = [theta ** (-2.0 * j / rotary_dim) for j in range(rotary_dim // 2)]
    inv_freq, attention_factor = _ROPE_TYPES[kind](plain, parameters, theta, max_position)
    if not all(math.isfinite(f) for f in inv_freq):
        raise FormatError("config", f"frequencies of type {kind} are not finite", key="rope_parameters")
    return Rope(head_dim, tuple(inv_freq), attention_factor)


Frequencies = tuple[list[float], float]


def _default(plain: list[float], p: HF, theta: float, max_position: int) -> Frequencies:
    return plain, 1.0


def _linear(plain: list[float], p: HF, theta: float, max_position: int) -> Frequencies:
    factor = read_positive(p, "factor")
    return [f / factor for f in plain], 1.0


def _frequency_factors(plain: list[float], p: HF, theta: float, max_position: int) -> Frequencies:
    factors = [read_positive({"factors": factor}, "factors") for factor in read(p, "factors", list)]
    if len(factors) != len(plain):
        raise FormatError("config", f"{len(factors)} factors for {len(plain)} frequencies", key="factors")
    return [f / factor for f, factor in zip(plain, factors)], 1.0


def _llama3(plain: list[float], p: HF, theta: float, max_position: int) -> Frequencies:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
    factor, low, high = (read_positive(p, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise FormatError("config", f"{high} is not above low_freq_factor {low}", key="high_freq_factor")
    context = read_size(p, "original_max_position_embeddings", max_position)
    out = []
    for f in plain:
        turns = context * f / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(f * keep + f / factor * (1 - keep))
    return out, 1.0


def _yarn(plain: list[float], p: HF, theta: float, max_position: int) -> Frequencies:
    """YaRN (Peng et al., 2023), section 3.2, with the paper's attention factor unless the config has its own."""
    factor, pairs = read_positive(p, "factor"), len(plain)
    context = read_size(p, "original_max_position_embeddings", max_position)

    def pair_that_turns(rotations: float) -> float:
        return pairs * math.log(context / (rotations * 2 * math.pi)) / math.log(theta)

    fast, slow = read_positive(p, "beta_fast", 32.0), read_positive(p, "beta_slow", 1.0)
    if fast < slow:
        raise FormatError("config", f"{fast} is below beta_slow {slow}", key="beta_fast")
    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if read(p, "truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0
    ramp = [min(1.0, max(0.0, (j - low) / (high - low))) for j in range(pairs)]
    out = [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp)]

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    paper = temperature(1.0)
    if p.get("mscale") and p.get("mscale_all_dim"):  # DeepSeek's variant; zero stands for none
        paper = temperature(read_positive(p, "mscale")) / temperature(read_positive(p, "mscale_all_dim"))
    return out, read_positive(p, "attention_factor", paper)


_ROPE_TYPES = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "frequency_factors": _frequency_factors,
}


def attention(b: ProgramBuilder, x: Value, c: DecoderConfig, layer: int, *, qkv_bias: bool, o_bias: bool) -> Value:
    """Grouped-query self-attention with rotary embedding. x [T, hidden] -> [T, hidden]."""
    q, k, v = _qkv(b, x, c, layer, bias=qkv_bias)
    a = _attend(b, q, k, v, c, layer, c.rope, None)
    return b.linear(a, f"layers.{layer}.o", c.hidden_size, bias=o_bias)


def qk_normed_attention(
    b: ProgramBuilder, x: Value, c: DecoderConfig, layer: int, *, rope: Rope, scale: float | None = None
) -> Value:
    """The same without biases, queries and keys normed head by head before ``rope``. x [T, hidden] -> [T, hidden].

    ``scale`` multiplies q . k and defaults to head_dim ** -0.5.
    """
    q, k, v = _qkv(b, x, c, layer)
    q = b.rms_norm(q, f"layers.{layer}.q_norm", c.rms_norm_eps, groups=c.num_heads)
    k = b.rms_norm(k, f"layers.{layer}.k_norm", c.rms_norm_eps, groups=c.num_kv_heads)
    a = _attend(b, q, k, v, c, layer, rope, scale)
    return b.linear(a, f"layers.{layer}.o", c.hidden_size)


def _qkv(b: ProgramBuilder, x: Value, c: DecoderConfig, layer: int, *, bias: bool = False) -> tuple[Value, ...]:
    """Queries [T, q_size], keys and values [T, kv_size] of ``layer``."""
    qkv = b.linear(x, f"layers.{layer}.qkv", c.q_size + 2 * c.kv_size, bias=bias)
    return b.split(qkv, c.q_size, c.kv_size, c.kv_size)


def _attend(
    b: ProgramBuilder, q: Value, k: Value, v: Value, c: DecoderConfig, layer: int, rope: Rope, scale: float | None
) -> Value:
    """Attention over the cache of ``layer`` after ``rope``. -> [T, q_size]."""
    q, k = b.rope(q, k, b.positions, rope)
    heads, kv_heads, window = c.num_heads, c.num_kv_heads, c.window_of(layer)
    return b.attention(q, k, v, layer=layer, num_heads=heads, num_kv_heads=kv_heads, scale=scale, window=window)


def swiglu(b: ProgramBuilder, x: Value, c: DecoderConfig, layer: int, *, bias: bool = False) -> Value:
    """Gated MLP (Shazeer, 2020). x [T, hidden] -> [T, hidden]."""
    gate_up = b.linear(x, f"layers.{layer}.gate_up", 2 * c.intermediate_size, bias=bias)
    return b.linear(b.silu_mul(gate_up), f"layers.{layer}.down", c.hidden_size, bias=bias)
