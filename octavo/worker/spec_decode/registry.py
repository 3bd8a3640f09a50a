"""Names of speculative methods -> their drafters."""

from __future__ import annotations

from octavo.config import SpeculativeConfig
from octavo.utils.registry import resolve
from octavo.worker.spec_decode.drafter import Drafter, NullDrafter

DRAFTERS = {
    "ngram": "octavo.worker.spec_decode.methods.ngram:NgramDrafter",
}


def make_drafter(config: SpeculativeConfig | None) -> Drafter:
    """The drafter that ``config`` asks for."""
    if config is None:
        return NullDrafter()
    drafter: Drafter = resolve(DRAFTERS[config.method])(config)
    return drafter
