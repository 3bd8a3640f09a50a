"""The sampling values that a model's makers recommend, from its ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path

from octavo.formats.hf import read_json

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(model_path: str) -> dict[str, float]:
    """Parameter -> value; empty for a single file and for a folder without the file. Raises FormatError."""
    folder = Path(model_path)
    if not (folder / "generation_config.json").is_file():
        return {}
    config = read_json(folder, "generation_config.json")
    return {name: config[name] for name in NAMES if isinstance(config.get(name), int | float)}
