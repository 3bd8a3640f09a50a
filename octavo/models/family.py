"""What a family file provides: a config, a program and a map of weights; all declarative. Knows no tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.program import Program

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Config(Protocol):
    """What the engine reads of a family's config; the rest is the family's own."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Where each parameter of the program comes from in a HF checkpoint.

    ``modules``: program name -> checkpoint modules, ``{i}`` standing for the layer; several are stacked along the
    output features. ``X`` is read from ``<module>.weight``, ``X.bias`` from ``<module>.bias``.
    ``tied``: program name -> the name whose weights it shares when the config says ``tie_word_embeddings``.
    ``ignored``: regular expressions of checkpoint tensors that carry nothing (caches that old versions saved).
    """

    modules: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def sources(self, name: str) -> tuple[str, ...]:
        """Checkpoint tensors that make up program parameter ``name``. Raises KeyError if the map lacks it."""
        module, kind = (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")
        number = _NUMBER.search(module)
        if number is None:
            return tuple(f"{source}.{kind}" for source in self.modules[module])
        pattern = module[: number.start()] + "{i}" + module[number.end() :]
        return tuple(f"{source.format(i=number.group())}.{kind}" for source in self.modules[pattern])


@dataclass(frozen=True, slots=True)
class Family:
    """An entry of the registry. ``config`` reads a HF-style config (raises ModelError); ``build`` makes the program."""

    config: Callable[[Mapping[str, Any]], Any]  # -> Config
    build: Callable[[Any], Program]
    weights: WeightMap
