"""A GGUF file as a Checkpoint: metadata becomes a HF-style config, tensor names become HF names.

Files of the ``llama`` architecture hold the rows of Q and K interleaved (pair j in rows 2j and 2j + 1 of a head). They
are put back into the half-split order of HF checkpoints here, as whole rows, hence without loss. Files of ``gemma3``
hold the weights of norms plus one, which is taken off. Knows no block formats.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.config import Dtype
from octavo.exceptions import FormatError, UnsupportedModel
from octavo.formats.gguf import GGUFFile
from octavo.quantization.base import Weight
from octavo.quantization.schemes import gguf as scheme
from octavo.quantization.schemes.unquantized import plus

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What is particular to files of one ``general.architecture``; ``hf_name`` is the HF architecture."""

    hf_name: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    interleaved: bool = False  # rows of Q and K
    norms_plus_one: bool = False


_ARCHITECTURES = {
    "gemma3": _Architecture("Gemma3ForCausalLM", _LAYER | _GEMMA_NORMS, norms_plus_one=True),
    "llama": _Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; names it does not know stay."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, module, kind = match.groups()
    known = (_TOP if layer is None else layer_names).get(module)
    if known is None:
        return name
    return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"


class GGUFCheckpoint:
    """See ``Checkpoint``. Raises FormatError naming the key, or UnsupportedModel for other architectures.

    Not ``whole``: the file may end after its header, and then nothing can be loaded.
    """

    def __init__(self, path: str, *, whole: bool = True) -> None:
        self.path = self.config_source = path
        file = GGUFFile(path, whole=whole)
        self._metadata = file.metadata
        self._arch = self._read("general.architecture", str)
        if self._arch not in _ARCHITECTURES:
            known = ", ".join(sorted(_ARCHITECTURES))
            raise UnsupportedModel(f"{path}: architecture {self._arch!r} is not one of {known}")
        known_as = self._known_as = _ARCHITECTURES[self._arch]
        self._tensors = {hf_name(name, known_as.layer_names): tensor for name, tensor in file.tensors.items()}
        self.config: Mapping[str, Any] = self._hf_config(known_as.hf_name)
        self._tensors.pop(_ROPE_FACTORS, None)
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        self._interleaved_heads: dict[str, int] = heads if known_as.interleaved else {}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def outline(self, name: str, dtype: Dtype) -> Weight:
        return scheme.outline_of(self._tensors[name].type, self.shape_of(name), dtype)

    def load(self, name: str, dtype: Dtype) -> Weight:
        tensor = self._tensors[name]
        rows = tensor.data.reshape(tensor.shape[0], -1)
        heads = self._interleaved_heads.get(name.split(".")[-2])
        if heads is not None:
            rows = half_split_rows(rows, heads)
        weight = scheme.from_blocks(rows, tensor.type, tensor.shape, dtype)
        if self._known_as.norms_plus_one and name.endswith("norm.weight"):
            return plus(weight, -1.0)
        return weight

    def _read(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise FormatError(self.path, "missing", key=key)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise FormatError(self.path, f"{value!r:.80} is not of type {kind.__name__}", key=key)
        return value

    def _hf_config(self, architecture: str) -> dict[str, Any]:
        arch = self._arch
        heads = self._read(f"{arch}.attention.head_count", int)
        hidden = self._read(f"{arch}.embedding_length", int)
        if heads < 1:
            raise FormatError(self.path, f"{heads} heads", key=f"{arch}.attention.head_count")
        if "model.embed_tokens.weight" not in self._tensors:
            raise FormatError(self.path, "the tensor is missing", key="token_embd.weight")
        head_dim = self._read(f"{arch}.attention.key_length", int, hidden // heads)
        config = {
            "architectures": [architecture],
            "hidden_size": hidden,
            "intermediate_size": self._read(f"{arch}.feed_forward_length", int),
            "num_hidden_layers": self._read(f"{arch}.block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self._read(f"{arch}.attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "vocab_size": self.shape_of("model.embed_tokens.weight")[0],
            "max_position_embeddings": self._read(f"{arch}.context_length", int),
            "rms_norm_eps": self._read(f"{arch}.attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": arch == "llama" and "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self._tensors,
            "rope_parameters": self._rope_parameters(head_dim),
        }
        if window := self._metadata.get(f"{arch}.attention.sliding_window"):
            config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        pattern = self._metadata.get(f"{arch}.attention.sliding_window_pattern")
        if isinstance(pattern, list):  # whether each layer slides
            config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
        return config

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        """HF's ``rope_parameters`` from GGUF's ``rope.*`` keys and the tensor of frequency factors."""
        prefix = f"{self._arch}.rope"
        kind = self._read(f"{prefix}.scaling.type", str, "none")
        rotated = self._read(f"{prefix}.dimension_count", int, head_dim)
        parameters: dict[str, Any] = {
            "rope_type": "default" if kind == "none" else kind,
            "rope_theta": self._read(f"{prefix}.freq_base", float, 10000.0),
            "partial_rotary_factor": rotated / head_dim if head_dim > 0 else 1.0,
        }
        if kind != "none":
            parameters["factor"] = self._read(f"{prefix}.scaling.factor", float)
            parameters["original_max_position_embeddings"] = self._metadata.get(
                f"{prefix}.scaling.original_context_length"
            )
        if f"{prefix}.scaling.attn_factor" in self._metadata:
            raise UnsupportedModel(f"{self.path}: {prefix}.scaling.attn_factor is not supported")
        if _ROPE_FACTORS in self._tensors:
            if kind != "none":
                raise UnsupportedModel(f"{self.path}: rope scaling {kind!r} together with {_ROPE_FACTORS}")
            tensor = self._tensors[_ROPE_FACTORS]
            factors = np.ones(tensor.shape, np.float32)
            if tensor.data.size:  # it is not there in a file that is not whole
                factors = scheme.from_blocks(tensor.data, tensor.type, tensor.shape).dequantize()
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise FormatError(self.path, "factors are not positive numbers", key=_ROPE_FACTORS)
            parameters |= {"rope_type": "frequency_factors", "factors": factors.tolist()}
        return parameters


def half_split_rows(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows [heads * D, n] from interleaved order (2j, 2j + 1 are a pair) to half-split (j, j + D/2 are)."""
    if rows.shape[0] % (2 * heads):
        raise UnsupportedModel(f"{rows.shape[0]} rows of Q or K for {heads} heads")
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
