"""The drafter of a speculative method."""

from __future__ import annotations

from octavo.config import SpeculativeConfig
from octavo.config.choices import DRAFTERS
from octavo.utils.registry import resolve
from octavo.worker.spec_decode.drafter import Drafter, NullDrafter


def make_drafter(config: SpeculativeConfig | None) -> Drafter:
    """The drafter that ``config`` asks for."""
    if config is None:
        return NullDrafter()
    drafter: Drafter = resolve(DRAFTERS[config.method])(config)
    return drafter
