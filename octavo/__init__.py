"""octavo: an LLM inference and serving engine with a paged KV cache that one person can read.

The public names are resolved when they are first touched, so that ``import octavo`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.outputs import RequestOutput
    from octavo.entrypoints.llm import LLM
    from octavo.messages import BeamSearchParams, SamplingParams

    __version__: str

_PUBLIC = {
    "AsyncLLM": "octavo.engine.async_llm:AsyncLLM",
    "BeamSearchParams": "octavo.messages:BeamSearchParams",
    "LLM": "octavo.entrypoints.llm:LLM",
    "RequestOutput": "octavo.engine.outputs:RequestOutput",
    "SamplingParams": "octavo.messages:SamplingParams",
}

__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "RequestOutput", "SamplingParams", "__version__"]


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _PUBLIC:
        from octavo.utils.registry import resolve

        value = resolve(_PUBLIC[name])
    else:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
