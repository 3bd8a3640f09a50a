"""Which scheme reads a checkpoint's ``quantization_config``. The only place that knows their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.exceptions import UnsupportedModel
from octavo.quantization.base import Scheme
from octavo.utils.registry import resolve

SCHEMES = {  # quant_method -> its reader, made from the config's section
    "awq": "octavo.quantization.schemes.awq:AWQ",
    "gptq": "octavo.quantization.schemes.gptq:GPTQ",
    "compressed-tensors": "octavo.quantization.schemes.compressed_tensors:make",
}


def find_scheme(config: Mapping[str, Any], source: str) -> Scheme | None:
    """The scheme of a model's config (as in config.json); None where weights are plain.

    Raises UnsupportedModel, with ``source``, for methods and settings that octavo lacks.
    """
    section = config.get("quantization_config", config.get("compression_config"))
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise UnsupportedModel(f"{source}: quantization_config must be an object, got {section!r}")
    method = section.get("quant_method")
    if method not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise UnsupportedModel(f"{source}: quant_method {method!r} is not supported; octavo reads {known}")
    try:
        scheme: Scheme = resolve(SCHEMES[method])(section)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source}: quantization_config of {method}: {error}") from error
    return scheme
