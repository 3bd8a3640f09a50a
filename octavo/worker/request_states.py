"""RequestStates: what the worker knows of each running request, in one permanent row per request.

How much of a request is computed is not here: each plan says it. Knows nothing of blocks, steps or the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import SAMPLE_ROW, Int32Array, SampleRows
from octavo.exceptions import RequestError
from octavo.messages import NewRequestData
from octavo.worker.sample.sampler import RequestSampler


class RequestStates:
    """Columns indexed by row; ``row_of`` maps the id of every running request to its row.

    token_ids[row]:   0 ...... num_prompt_tokens ...... num_tokens ...... max_model_len
                      |  prompt     |  output so far       |  free
    """

    def __init__(self, num_rows: int, max_model_len: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Pages of this array that no request has touched take no memory.
        self.token_ids: Int32Array = np.empty((num_rows, max_model_len), np.int32)
        self.num_tokens: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.wants_prompt_logprobs: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.prompt_logprob_start: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)  # first position to score
        self.has_processors: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.sample_rows: SampleRows = np.zeros(num_rows, SAMPLE_ROW)
        self.samplers: list[RequestSampler | None] = [None] * num_rows
        self.siblings: dict[int, dict[str, int]] = {}  # by row, until their first tokens are sampled
        self.row_of: dict[str, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def add(self, request: NewRequestData) -> int:
        """Give ``request`` a row and return it. Raises RequestError, changing nothing, if it cannot have one."""
        self._check(request)
        sampler = RequestSampler.of(request, self._vocab_size)
        row = self._free.pop()
        count = len(request.token_ids)
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.wants_prompt_logprobs[row] = request.sampling_params.wants_prompt_logprobs
        self.prompt_logprob_start[row] = min(request.sampling_params.prompt_logprob_start, request.num_prompt_tokens)
        self.samplers[row] = sampler
        self.sample_rows[row] = sampler.row[0]
        self.has_processors[row] = bool(sampler.processors)
        if request.siblings:
            self.siblings[row] = request.siblings
        self.row_of[request.request_id] = row
        return row

    def _check(self, request: NewRequestData) -> None:
        tokens, capacity = request.token_ids, self.token_ids.shape[1]
        if request.request_id in self.row_of:
            raise RequestError(f"request {request.request_id!r} is already running")
        if not self._free:
            raise RequestError(f"all {len(self.samplers)} rows of the worker are taken")
        if not 1 <= request.num_prompt_tokens <= len(tokens) <= capacity:
            raise RequestError(
                f"{len(tokens)} tokens, {request.num_prompt_tokens} of them prompt: must be in [1, {capacity}]"
            )
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise RequestError(f"a token id is outside [0, {self._vocab_size - 1}]")

    def remove(self, request_id: str) -> None:
        """Free the row of ``request_id``; unknown ids are ignored."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self.samplers[row] = None
            self.siblings.pop(row, None)
            self._free.append(row)

    def append(self, rows: npt.NDArray[np.int64], token_ids: Int32Array) -> None:
        """Append a sampled token to each of ``rows``. One that no longer fits is dropped: nothing can follow it."""
        counts = self.num_tokens[rows]
        fits = counts < self.token_ids.shape[1]
        if not fits.all():
            rows, token_ids, counts = rows[fits], token_ids[fits], counts[fits]
        self.token_ids[rows, counts] = token_ids
        self.num_tokens[rows] = counts + 1

    def place_drafts(self, row: int, token_ids: Sequence[int]) -> None:
        """Put ``token_ids`` behind the known tokens of ``row``, without making them known.

        Raises ValueError if they do not fit.
        """
        count = self.num_tokens[row]
        self.token_ids[row, count : count + len(token_ids)] = token_ids

    def tokens(self, row: int) -> Int32Array:
        """Prompt and output of ``row``, int32 ``[num_tokens]``, a view."""
        return self.token_ids[row, : self.num_tokens[row]]
