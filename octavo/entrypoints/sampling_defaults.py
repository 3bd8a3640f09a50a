"""Default sampling parameters: what a model's makers recommend, and what its server was told.

``override_generation_config`` comes before the ``generation_config.json`` of the model (or of another folder), or the
``general.sampling`` keys of its GGUF file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from octavo.config import SamplingConfig
from octavo.exceptions import ConfigError, ValidationError
from octavo.formats.gguf import GGUFFile
from octavo.formats.hf import read_json
from octavo.messages import SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# key of the file -> SamplingParams field
KEYS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
KEYS |= {"max_new_tokens": "max_tokens"}
GGUF_KEYS = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
GGUF_KEYS |= {"penalty_repeat": "repetition_penalty"}
OVERRIDES = KEYS | {name: name for name in ("presence_penalty", "frequency_penalty", "max_tokens")}


def read_sampling_defaults(model_path: str, config: SamplingConfig) -> dict[str, Any]:
    """SamplingParams field -> value, for requests that do not bring the field. ``model_path`` is local.

    A wrong value of the model's own is left out, with a warning. Raises ConfigError for a wrong override or folder,
    FormatError for a file that is no JSON object.
    """
    return _recommended(model_path, config.generation_config) | sampling_overrides(config)


def _recommended(model_path: str, source: str) -> dict[str, Any]:
    if source == "vllm":
        return {}
    folder = Path(model_path if source == "auto" else source)
    if source == "auto" and folder.is_file():
        metadata = GGUFFile(model_path).metadata
        keys = {f"general.sampling.{key}": field for key, field in GGUF_KEYS.items()}
        return _sound({field: metadata[key] for key, field in keys.items() if key in metadata})
    if not (folder / FILE).is_file():
        if source != "auto":
            raise ConfigError(f"generation_config = {source!r}: there is no {FILE}")
        return {}
    given = read_json(folder, FILE)
    return _sound({field: given[key] for key, field in KEYS.items() if given.get(key) is not None})


def _sound(values: dict[str, Any]) -> dict[str, Any]:
    """Those that SamplingParams takes."""
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = getattr(SamplingParams(**{name: value}), name)
        except ValidationError as error:
            logger.warning("the model's default is ignored: %s", error)
    return kept


def sampling_overrides(config: SamplingConfig) -> dict[str, Any]:
    """What ``override_generation_config`` sets. Raises ConfigError."""
    given = config.override_generation_config or {}
    unknown = set(given) - set(OVERRIDES)
    if unknown:
        known = ", ".join(sorted(OVERRIDES))
        raise ConfigError(f"override_generation_config has {', '.join(sorted(unknown))}; it may have {known}")
    values = {OVERRIDES[key]: value for key, value in given.items()}
    try:
        params = SamplingParams(**values)
    except ValidationError as error:
        raise ConfigError(f"override_generation_config: {error}") from error
    return {name: getattr(params, name) for name in values}
