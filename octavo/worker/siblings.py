"""Siblings: several first tokens out of one prompt's logits. Knows nothing of when they become requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.backends.base import SAMPLE_ROW, SampleRows
from octavo.worker.request_states import RequestStates


class Siblings(NamedTuple):
    """``ids[i]``: (id of a sibling, state row of the request with the prompt); ``rows[i]``: how to draw its token."""

    ids: list[tuple[str, int]]
    rows: SampleRows


NONE = Siblings([], np.empty(0, SAMPLE_ROW))


def sibling_rows(states: RequestStates, sampled_rows: npt.NDArray[np.int64], rows: SampleRows) -> Siblings:
    """The siblings of those of ``sampled_rows`` that have some, which are told once.

    A sibling's row is that of its request in ``rows``, with another sample index: same logits, same processors.
    """
    if not states.siblings:
        return NONE
    ids: list[tuple[str, int]] = []
    places: list[int] = []
    indices: list[int] = []
    for place, row in enumerate(sampled_rows.tolist()):
        for request_id, sample_index in states.siblings.pop(row, {}).items():
            ids.append((request_id, row))
            places.append(place)
            indices.append(sample_index)
    chosen = rows[places]
    chosen["sample_index"] = indices
    return Siblings(ids, chosen)
