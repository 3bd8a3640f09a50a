"""All of a Weight but its numbers, to be compared."""

from __future__ import annotations

from typing import Any

from octavo.quantization.base import Weight

ARRAYS = ("data", "scale", "minimum", "scale_unit", "minimum_unit")


def sizes(weight: Weight) -> dict[str, Any]:
    """Its facts, and of each array shape and type."""
    facts = {name: getattr(weight, name) for name in ("format", "shape", "group_size", "source", "bits", "zero")}
    arrays = {name: array for name in ARRAYS if (array := getattr(weight, name)) is not None}
    return facts | {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
