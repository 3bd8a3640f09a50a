"""The contract of a checkpoint: a HF-style config and tensors by their HF names, whatever the files are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from octavo.config import Dtype
from octavo.quantization.base import Weight


class Checkpoint(Protocol):
    """An opened checkpoint; nothing of its tensors has been read yet.

    ``config_source`` names where the config came from, for messages. Tensor names are keys of ``names``.
    """

    path: str
    config_source: str
    config: Mapping[str, Any]

    def names(self) -> Collection[str]:
        """All tensors, by HF name."""
        ...

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Rows first."""
        ...

    def files(self) -> tuple[str, ...]:
        """All files that tensors and config come from."""
        ...

    def outline(self, name: str, dtype: Dtype) -> Weight:
        """What ``load`` would give, without its numbers. Raises UnsupportedModel for types octavo lacks."""
        ...

    def load(self, name: str, dtype: Dtype) -> Weight:
        """The tensor in a canonical format. Raises UnsupportedModel for types octavo lacks."""
        ...
