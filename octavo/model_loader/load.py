"""``inspect_model``, ``outline_model`` and ``load_model``: the ways into a checkpoint. Reads local files only."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import Dtype, ModelConfig
from octavo.exceptions import FormatError, ModelError, ModelNotFound, UnsupportedModel
from octavo.formats.hf import read_json
from octavo.model_loader.checkpoint import Checkpoint
from octavo.model_loader.gguf import GGUFCheckpoint
from octavo.model_loader.safetensors import SafetensorsCheckpoint
from octavo.model_loader.weight_map import identity_of, load_weights, match_tensors, outline_weights
from octavo.models.family import Config, Family
from octavo.models.registry import find_family
from octavo.program import LayerKV, Program
from octavo.program.passes.outputs import keep_outputs
from octavo.quantization.base import LazyWeights, Weight, Weights, owners
from octavo.quantization.registry import find_scheme
from octavo.quantization.schemes import unquantized

MAX_LAYERS = 1000  # of a model of which only the config is there
_FLOAT_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model without its weights.

    ``config`` is HF-style (made from the metadata in the case of GGUF). ``max_position`` is the model's own longest
    context in tokens; ``weight_bytes`` the weights in memory before a backend packs them; ``weights_format`` the
    types of matrices, the most common first, e.g. ``"Q4_1 + Q8_0"``.
    """

    architecture: str
    config: Mapping[str, Any]
    max_position: int
    vocab_size: int
    num_layers: int
    weight_bytes: int
    weights_format: str
    kv_layers: tuple[LayerKV, ...]


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A program, the outlines of its weights (``quantization.base.outline``), and the facts about them."""

    program: Program
    weights: Weights
    info: ModelFacts


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A program, its weights in canonical formats (read when asked for), their outlines, and the facts about them."""

    program: Program
    weights: LazyWeights
    info: ModelFacts
    outlines: Weights

    @property
    def outline(self) -> ModelOutline:
        return ModelOutline(self.program, self.outlines, self.info)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose config, program and tensor names have been found to agree."""

    checkpoint: Checkpoint
    family: Family
    program: Program
    sources: dict[str, tuple[str, ...]]
    outlines: Weights
    info: ModelFacts


# The last inspected model: a process that inspects is about to load, and a large vocabulary takes 0.1 s to parse.
_inspected: dict[tuple[str, str], tuple[str, _Opened]] = {}


def inspect_model(path: str, model_config: ModelConfig) -> ModelFacts:
    """Facts about the model at ``path`` (a GGUF file or a HF folder); reads headers only.

    Raises ModelNotFound, FormatError, UnsupportedModel, or ModelError when config and tensors contradict.
    """
    opened = _open(_open_checkpoint(path), model_config.dtype)
    _inspected.clear()
    _inspected[path, model_config.dtype] = (identity_of(opened.checkpoint.files(), model_config.dtype), opened)
    return opened.info


def outline_model(model_config: ModelConfig) -> ModelOutline:
    """The model at ``model_config.model``, of which the weights need not be there.

    A folder may have nothing but config.json, a GGUF file may end after its header. Raises as ``inspect_model``.
    """
    path, dtype = model_config.model, model_config.dtype
    if os.path.isdir(path) and not any(Path(path).glob("*.safetensors")):
        return _outline_of_config(path, dtype)
    opened = _open(_open_checkpoint(path, whole=False), dtype)
    return ModelOutline(opened.program, opened.outlines, opened.info)


def load_model(model_config: ModelConfig) -> LoadedModel:
    """The model at ``model_config.model``, a local path. Raises as ``inspect_model``."""
    path, dtype = model_config.model, model_config.dtype
    identity, opened = _inspected.pop((path, dtype), ("", None))
    if opened is None or identity != identity_of(opened.checkpoint.files(), dtype):
        opened = _open(_open_checkpoint(path), dtype)
    weights = load_weights(opened.program, opened.family.weights, opened.sources, opened.checkpoint, dtype)
    return LoadedModel(opened.program, weights, opened.info, opened.outlines)


def _open(checkpoint: Checkpoint, dtype: Dtype) -> _Opened:
    architecture, family = find_family(checkpoint.config, checkpoint.config_source)
    config = _read_config(family, checkpoint.config, checkpoint.config_source)
    if config.num_layers > len(checkpoint.names()):  # before a program of that many layers is built
        raise ModelError(f"{checkpoint.path}: {config.num_layers} layers, but only {len(checkpoint.names())} tensors")
    program = keep_outputs(family.build(config))
    tied = config.tie_word_embeddings
    sources = match_tensors(program, family.weights, tied=tied, checkpoint=checkpoint)
    outlines = outline_weights(
        program,
        family.weights,
        tied=tied,
        outline=lambda name: tuple(checkpoint.outline(source, dtype) for source in sources[name]),
    )
    info = _info(architecture, checkpoint.config, config, program, outlines)
    return _Opened(checkpoint, family, program, sources, outlines, info)


def _outline_of_config(path: str, dtype: Dtype) -> ModelOutline:
    """Of a folder without weights: they are taken to be what config.json says, the quantised ones being in layers."""
    hf, source = read_json(path, "config.json"), str(Path(path) / "config.json")
    architecture, family = find_family(hf, source)
    scheme = find_scheme(hf, source)
    config = _read_config(family, hf, source)
    if config.num_layers > MAX_LAYERS:
        reason = f"{config.num_layers} layers, at most {MAX_LAYERS} are allowed"
        raise FormatError(source, reason, key="num_hidden_layers")
    stored = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if not isinstance(stored, str) or stored not in _FLOAT_TYPES:
        raise UnsupportedModel(f"{source}: dtype {stored!r:.80}: must be one of {', '.join(_FLOAT_TYPES)}")
    program = keep_outputs(family.build(config))

    def outline(name: str) -> tuple[Weight, ...]:
        shape = program.weights[name].shape
        if scheme is not None and len(shape) == 2 and name.startswith("layers."):
            return (scheme.outline(shape),)
        return (unquantized.outline_of(shape, _FLOAT_TYPES[stored], dtype),)

    outlines = outline_weights(program, family.weights, tied=config.tie_word_embeddings, outline=outline)
    return ModelOutline(program, outlines, _info(architecture, hf, config, program, outlines))


def _read_config(family: Family, hf: Mapping[str, Any], source: str) -> Config:
    """The family's config; errors name ``source``."""
    try:
        config: Config = family.config(hf)
    except FormatError as error:
        raise FormatError(source, error.reason, key=error.key) from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source}: {error}") from error
    return config


def _info(architecture: str, hf: Mapping[str, Any], config: Config, program: Program, outlines: Weights) -> ModelFacts:
    parts = [part for name, owner in owners(outlines).items() if name == owner for part in outlines[name]]
    return ModelFacts(
        architecture=architecture,
        config=hf,
        max_position=config.max_position,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        weight_bytes=sum(part.num_bytes for part in parts),
        weights_format=_weights_format(parts),
        kv_layers=program.kv_layers,
    )


def _open_checkpoint(path: str, *, whole: bool = True) -> Checkpoint:
    if os.path.isdir(path):
        return SafetensorsCheckpoint(path)
    if os.path.isfile(path):
        return GGUFCheckpoint(path, whole=whole)
    raise ModelNotFound(f"{path}: no such file or folder")


def _weights_format(parts: Iterable[Weight]) -> str:
    elements: Counter[str] = Counter()
    for part in parts:
        if len(part.shape) > 1:
            elements[part.source] += math.prod(part.shape)
    return " + ".join(kind for kind, _ in elements.most_common())
