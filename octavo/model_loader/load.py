"""``inspect_model`` and ``load_model``: the two ways into a checkpoint. Reads local files only."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import ModelConfig
from octavo.exceptions import FormatError, ModelError, ModelNotFound, UnsupportedModel
from octavo.model_loader.checkpoint import Checkpoint
from octavo.model_loader.gguf import GGUFCheckpoint
from octavo.model_loader.safetensors import SafetensorsCheckpoint
from octavo.model_loader.weight_map import identity_of, load_weights, match_tensors
from octavo.models.family import Family
from octavo.models.registry import find_family
from octavo.program import KVGroups, Program
from octavo.quantization.base import LazyWeights


@dataclass(frozen=True, slots=True)
class ModelInfo:
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
    num_kv_heads: int
    head_dim: int
    weight_bytes: int
    weights_format: str
    kv_groups: KVGroups


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A program, its weights in canonical formats (read when asked for), and the facts about them."""

    program: Program
    weights: LazyWeights
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose config, program and tensor names have been found to agree."""

    checkpoint: Checkpoint
    family: Family
    program: Program
    sources: dict[str, tuple[str, ...]]
    info: ModelInfo


# The last inspected model: a process that inspects is about to load, and a large vocabulary takes 0.1 s to parse.
_inspected: dict[tuple[str, str], tuple[str, _Opened]] = {}


def inspect_model(path: str, model_config: ModelConfig) -> ModelInfo:
    """Facts about the model at ``path`` (a GGUF file or a HF folder); reads headers only.

    Raises ModelNotFound, FormatError, UnsupportedModel, or ModelError when config and tensors contradict.
    """
    opened = _open(path, model_config)
    _inspected.clear()
    _inspected[path, model_config.dtype] = (identity_of(opened.checkpoint.files(), model_config.dtype), opened)
    return opened.info


def load_model(model_config: ModelConfig) -> LoadedModel:
    """The model at ``model_config.model``, a local path. Raises as ``inspect_model``."""
    path, dtype = model_config.model, model_config.dtype
    identity, opened = _inspected.pop((path, dtype), ("", None))
    if opened is None or identity != identity_of(opened.checkpoint.files(), dtype):
        opened = _open(path, model_config)
    weights = load_weights(opened.program, opened.family.weights, opened.sources, opened.checkpoint, dtype)
    return LoadedModel(opened.program, weights, opened.info)


def _open(path: str, model_config: ModelConfig) -> _Opened:
    checkpoint = _open_checkpoint(path)
    architecture, family = find_family(checkpoint.config, checkpoint.config_source)
    try:
        config = family.config(checkpoint.config)
    except FormatError as error:
        raise FormatError(checkpoint.config_source, error.reason, key=error.key) from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{checkpoint.config_source}: {error}") from error
    if config.num_layers > len(checkpoint.names()):  # before a program of that many layers is built
        raise ModelError(f"{path}: {config.num_layers} layers, but only {len(checkpoint.names())} tensors")
    program = family.build(config)
    sources = match_tensors(program, family.weights, tied=config.tie_word_embeddings, checkpoint=checkpoint)
    used = [source for parts in sources.values() for source in parts]
    info = ModelInfo(
        architecture=architecture,
        config=checkpoint.config,
        max_position=config.max_position,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        weight_bytes=sum(checkpoint.loaded_bytes(name, model_config.dtype) for name in used),
        weights_format=_weights_format(checkpoint, used),
        kv_groups=program.kv_groups,
    )
    return _Opened(checkpoint, family, program, sources, info)


def _open_checkpoint(path: str) -> Checkpoint:
    if os.path.isdir(path):
        return SafetensorsCheckpoint(path)
    if os.path.isfile(path):
        return GGUFCheckpoint(path)
    raise ModelNotFound(f"{path}: no such file or folder")


def _weights_format(checkpoint: Checkpoint, names: list[str]) -> str:
    elements: Counter[str] = Counter()
    for name in names:
        if len(checkpoint.shape_of(name)) > 1:
            elements[checkpoint.type_of(name)] += math.prod(checkpoint.shape_of(name))
    return " + ".join(kind for kind, _ in elements.most_common())
