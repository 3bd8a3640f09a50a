"""A folder with config.json and safetensors as a Checkpoint. Knows nothing of architectures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from octavo.config import Dtype
from octavo.exceptions import FormatError, UnsupportedModel
from octavo.formats.hf import SafetensorsFolder, read_json
from octavo.quantization.base import Scheme, Weight
from octavo.quantization.registry import find_scheme
from octavo.quantization.schemes import unquantized

_FLOATS = ("F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """See ``Checkpoint``. Raises ModelError subclasses when files are absent or malformed.

    Weights that a quantisation scheme keeps in several tensors appear as one, ``<module>.weight``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.config_source = str(Path(path) / "config.json")
        self.config: Mapping[str, Any] = read_json(path, "config.json")
        scheme = find_scheme(self.config, self.config_source)
        self._tensors = SafetensorsFolder(path)
        self._quantized = {} if scheme is None else _quantized(scheme, self._tensors)  # by the weight's name
        stored = {part for weight in self._quantized.values() for part in weight.parts.values()}
        self._names = [name for name in self._tensors if name not in stored] + list(self._quantized)

    def names(self) -> Collection[str]:
        return self._names

    def shape_of(self, name: str) -> tuple[int, ...]:
        weight = self._quantized.get(name)
        return self._tensors.shape_of(name) if weight is None else weight.shape()

    def files(self) -> tuple[str, ...]:
        folder = Path(self.path)
        names = [self.config_source, *folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
        return tuple(sorted(str(name) for name in names))

    def outline(self, name: str, dtype: Dtype) -> Weight:
        if (weight := self._quantized.get(name)) is not None:
            try:
                return weight.scheme.outline(weight.shape())
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{self.path}: {name}: {error}") from error
        return unquantized.outline_of(self.shape_of(name), self._tensors.dtype_of(name), dtype)

    def load(self, name: str, dtype: Dtype) -> Weight:
        if (weight := self._quantized.get(name)) is not None:
            return weight.load()
        return unquantized.from_array(self._tensors[name], self._tensors.dtype_of(name), dtype)


class _QuantizedWeight:
    """The weight of one module: ``parts``, suffix -> tensor."""

    def __init__(self, scheme: Scheme, tensors: SafetensorsFolder, parts: Mapping[str, str]) -> None:
        self.scheme, self.parts = scheme, parts
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {suffix: self._tensors.shape_of(name) for suffix, name in self.parts.items()}

    def shape(self) -> tuple[int, ...]:
        try:
            return self.scheme.shape(self.shapes())
        except (KeyError, ValueError) as error:
            found = ", ".join(f"{name} {list(self._tensors.shape_of(name))}" for name in self.parts.values())
            raise FormatError(self._tensors.folder, f"{found} are not a weight of {self.scheme.name}") from error

    def load(self) -> Weight:
        try:
            return self.scheme.weight({suffix: self._read(name) for suffix, name in self.parts.items()})
        except KeyError as error:
            name = next(iter(self.parts.values()))
            raise FormatError(self._tensors.folder, f"{error.args[0]} is missing beside it", key=name) from error
        except FormatError as error:
            raise FormatError(self._tensors.folder, error.reason, key=next(iter(self.parts.values()))) from error
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self._tensors.folder}: {next(iter(self.parts.values()))}: {error}") from error

    def _read(self, name: str) -> npt.NDArray[Any]:
        kind, data = self._tensors.dtype_of(name), self._tensors[name]
        return unquantized.to_float32(data, kind) if kind in _FLOATS else data


def _quantized(scheme: Scheme, tensors: SafetensorsFolder) -> dict[str, _QuantizedWeight]:
    """The weights of all modules that have the scheme's marker."""
    found = {}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        if suffix == scheme.marker:
            parts = {one: f"{module}.{one}" for one in scheme.suffixes if f"{module}.{one}" in tensors}
            found[f"{module}.weight"] = _QuantizedWeight(scheme, tensors, parts)
    return found
