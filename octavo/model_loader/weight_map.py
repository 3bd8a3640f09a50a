"""Applies a family's WeightMap to a checkpoint: every parameter of the program gets its tensors, every tensor its use.

Knows neither files nor architectures.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from octavo.config import Dtype
from octavo.exceptions import ModelError
from octavo.model_loader.checkpoint import Checkpoint
from octavo.models.family import WeightMap
from octavo.program import Program
from octavo.quantization.base import LazyWeights, Weight, Weights
from octavo.quantization.schemes.unquantized import plus

_READERS = ("model_loader", "models", "quantization")  # the packages that decide what values come of a file


def match_tensors(
    program: Program, weight_map: WeightMap, *, tied: bool, checkpoint: Checkpoint
) -> dict[str, tuple[str, ...]]:
    """Program parameter -> checkpoint tensors stacked into it; tied parameters are left out.

    Raises ModelError when tensors are missing, left over, or of a shape the program does not expect.
    """
    shared = weight_map.tied if tied else {}
    names = checkpoint.names()
    sources = {name: weight_map.sources(name) for name in program.weights if name not in shared}
    if missing := [s for parts in sources.values() for s in parts if s not in names]:
        raise ModelError(f"{checkpoint.path}: {_count(missing)} missing")
    expected = {s for parts in sources.values() for s in parts}
    expected |= {s for name in shared for s in weight_map.sources(name)}  # a copy that the config says not to use
    unused = [n for n in names if n not in expected and not any(re.fullmatch(p, n) for p in weight_map.ignored)]
    if unused:
        raise ModelError(f"{checkpoint.path}: octavo does not use {_count(unused)}; the architecture must differ")
    for name, parts in sources.items():
        _check_shape(program, name, parts, checkpoint)
    return sources


def outline_weights(
    program: Program, weight_map: WeightMap, *, tied: bool, outline: Callable[[str], tuple[Weight, ...]]
) -> Weights:
    """The parameters as ``outline`` makes them by name, tied ones being the same tuple."""
    shared = weight_map.tied if tied else {}
    found = {name: outline(name) for name in program.weights if name not in shared}
    return found | {name: found[shared[name]] for name in program.weights if name in shared}


def load_weights(
    program: Program, weight_map: WeightMap, sources: dict[str, tuple[str, ...]], checkpoint: Checkpoint, dtype: Dtype
) -> LazyWeights:
    """The parameters, to be read when asked for. Tied ones are the same tuple as the parameter they share."""

    def load(name: str) -> tuple[Weight, ...]:
        parts = tuple(checkpoint.load(source, dtype) for source in sources[name])
        return tuple(plus(part, 1.0) for part in parts) if weight_map.adds_one(name) else parts

    tied = {name: weight_map.tied[name] for name in program.weights if name not in sources}
    files = checkpoint.files()
    return LazyWeights(load, program.weights, tied, files, partial(identity_of, files, dtype))


def identity_of(files: Collection[str], dtype: Dtype) -> str:
    """Of the files' contents and of the code that reads them, as hex.

    A file is taken as unchanged while device, inode, size, time of its content and time of any change are the same:
    the last one cannot be set by a program, so a file of equal size and date does not pass for another. Empty when a
    file is gone.
    """
    digest = hashlib.sha256(dtype.encode())
    for file in files:
        try:
            stat = os.stat(file)
        except OSError:
            return ""
        digest.update(repr((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)).encode())
    for package in _READERS:
        for source in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _check_shape(program: Program, name: str, parts: tuple[str, ...], checkpoint: Checkpoint) -> None:
    shapes = [checkpoint.shape_of(part) for part in parts]
    wanted = program.weights[name].shape
    if sum(shape[0] for shape in shapes) != wanted[0] or any(shape[1:] != wanted[1:] for shape in shapes):
        listed = ", ".join(f"{part} {list(shape)}" for part, shape in zip(parts, shapes))
        raise ModelError(f"{checkpoint.path}: {listed} do not make up {name} {list(wanted)} of the config")


def _count(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({first}{', ...' if len(names) > 3 else ''})"
