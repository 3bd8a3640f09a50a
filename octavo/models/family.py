"""What a family file provides: a config, a program and a map of weights; all declarative. Knows no tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.program import Program

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Config(Protocol):
    """What the engine reads of a family's config; the rest is the family's own."""

    @property
    def num_layers(self) -> int: ...
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
    ``plus_one``: program names whose checkpoint tensors hold the parameter less one.
    ``ignored``: regular expressions of checkpoint tensors that carry nothing (caches that old versions saved).
    """

    modules: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    plus_one: Collection[str] = ()

    def sources(self, name: str) -> tuple[str, ...]:
        """Checkpoint tensors that make up program parameter ``name``. Raises KeyError if the map lacks it."""
        module, kind = (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")
        pattern, number = _pattern(module)
        return tuple(f"{source.format(i=number)}.{kind}" for source in self.modules[pattern])

    def adds_one(self, name: str) -> bool:
        """Whether program parameter ``name`` is one more than its tensor."""
        return _pattern(name)[0] in self.plus_one


def _pattern(module: str) -> tuple[str, str]:
    """A key of ``WeightMap.modules`` and the number that ``{i}`` stands for in it."""
    number = _NUMBER.search(module)
    if number is None:
        return module, ""
    return module[: number.start()] + "{i}" + module[number.end() :], number.group()


@dataclass(frozen=True, slots=True)
class Family:
    """An entry of the registry. ``config`` reads a HF-style config (raises ModelError); ``build`` makes the program."""

    config: Callable[[Mapping[str, Any]], Any]  # -> Config
    build: Callable[[Any], Program]
    weights: WeightMap
