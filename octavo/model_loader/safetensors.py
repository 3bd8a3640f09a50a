"""A folder with config.json and safetensors as a Checkpoint. Knows nothing of architectures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.exceptions import UnsupportedModel
from octavo.formats.hf import SafetensorsFolder, read_json
from octavo.quantization.base import Weight
from octavo.quantization.schemes import unquantized
from octavo.quantization.schemes.unquantized import Dtype


class SafetensorsCheckpoint:
    """See ``Checkpoint``. Raises ModelError subclasses when files are absent, malformed or quantised."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.config_source = str(Path(path) / "config.json")
        self.config: Mapping[str, Any] = read_json(path, "config.json")
        if quantization := self.config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise UnsupportedModel(f"{self.config_source}: quantisation {method!r} is not supported")
        self._tensors = SafetensorsFolder(path)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def type_of(self, name: str) -> str:
        return self._tensors.dtype_of(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape_of(name)

    def files(self) -> tuple[str, ...]:
        folder = Path(self.path)
        names = [self.config_source, *folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
        return tuple(sorted(str(name) for name in names))

    def loaded_bytes(self, name: str, dtype: Dtype) -> int:
        shape = self.shape_of(name)
        unquantized.check_type(self.type_of(name))
        each = 4.0 if len(shape) == 1 else unquantized.bytes_per_element(self.type_of(name), dtype)
        return int(math.prod(shape) * each)

    def load(self, name: str, dtype: Dtype) -> Weight:
        return unquantized.from_array(self._tensors[name], self.type_of(name), dtype)
