"""What a logits processor is. Knows nothing of batches: a processor sees one row of one request."""

from __future__ import annotations

from typing import Protocol

from octavo.backends.base import FloatArray, Int32Array


class LogitsProcessor(Protocol):
    """Changes one row of logits in place, as a pure function of the row and the request's tokens."""

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        """``row`` is float32 ``[vocab_size]``; ``token_ids`` is prompt + output so far, int32 ``[num_tokens]``.

        A token is excluded by setting its logit to -inf.
        """
        ...
