"""Architectures by the name that ``config.json`` gives them, resolved lazily."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.exceptions import FormatError, UnsupportedModel
from octavo.models.family import Family
from octavo.utils.registry import resolve

FAMILIES = {
    "Gemma3ForCausalLM": "octavo.models.families.gemma3:FAMILY",
    "LlamaForCausalLM": "octavo.models.families.llama:FAMILY",
    "MistralForCausalLM": "octavo.models.families.llama:FAMILY",
    "Qwen2ForCausalLM": "octavo.models.families.qwen2:FAMILY",
}


def find_family(config: Mapping[str, Any], path: object) -> tuple[str, Family]:
    """Architecture name and family of a HF-style config; ``path`` is for messages. Raises UnsupportedModel."""
    names = config.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(path, "not a list of architecture names", key="architectures")
    for name in names:
        if name in FAMILIES:
            family: Family = resolve(FAMILIES[name])
            return name, family
    raise UnsupportedModel(f"{path}: architecture {', '.join(names)} is not one of {', '.join(sorted(FAMILIES))}")
