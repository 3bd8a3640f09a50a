"""Structured output: which tokens each constrained request may choose next.

The state of a matcher is a function of the request's output tokens, so a request that comes back after a preemption
is where it was. When a grammar leaves nothing but the end, the end is taken whatever else the request asked for: its
processors, which may exclude it, are left out. Knows nothing of grammars' text, nor of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import numpy as np

from octavo.backends.base import BitArray, SampleRows
from octavo.exceptions import RequestError
from octavo.messages import NewRequestData
from octavo.structured_output.bank import GrammarBank, MaskBudget, Matcher


class Constraints:
    """Matchers of the running requests. False where no request has one."""

    def __init__(self, grammars: GrammarBank | None) -> None:
        self._grammars = grammars
        self._matchers: dict[str, Matcher] = {}
        self._budgets: WeakValueDictionary[str, MaskBudget] = WeakValueDictionary()  # as long as there are matchers
        self._masks: BitArray = np.zeros((0, 0), np.uint32)  # kept, for new pages cost

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def add(self, request: NewRequestData) -> None:
        """A request begins, or comes back. Raises RequestError if its grammar does not compile or does not fit it."""
        if request.output.grammar is None:
            return
        if self._grammars is None:
            raise RequestError("structured output is not available here")
        output = request.token_ids[request.num_prompt_tokens :]
        family = request.request_id.partition(".")[0]  # samples of one request are <id>.0, <id>.1, ...
        budget = self._budgets.setdefault(family, MaskBudget())
        self._matchers[request.request_id] = self._grammars.matcher(request.output.grammar, output, budget)

    def remove(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        self._matchers.pop(request_id, None)

    def masks(
        self, request_ids: Sequence[str], rows: SampleRows, fail: Callable[[str, Exception], None]
    ) -> BitArray | None:
        """A mask for each constrained request; ``rows``, one of each of ``request_ids``, learn where theirs is.

        ``fail`` hears of requests whose grammar cannot go on.
        """
        wanting = [i for i, request_id in enumerate(request_ids) if request_id in self._matchers]
        if not wanting:
            return None
        assert self._grammars is not None
        if len(self._masks) < len(wanting):
            self._masks = np.zeros((len(wanting), self._grammars.mask_words), np.uint32)
        for place, i in enumerate(wanting):
            try:
                is_over = self._matchers[request_ids[i]].fill(self._masks[place])
            except Exception as error:
                fail(request_ids[i], error)
                continue
            rows["mask_row"][i] = place
            if is_over:
                rows["adjusted_row"][i] = -1
        return self._masks

    def allowed(self, request_id: str, token_ids: list[int]) -> list[int]:
        """As many of ``token_ids``, one after the other, as the request's grammar allows to come next."""
        matcher = self._matchers.get(request_id)
        return token_ids if matcher is None else token_ids[: matcher.count_allowed(token_ids)]

    def take(self, request_id: str, token_id: int) -> None:
        """``token_id`` was chosen. Raises RequestError if the grammar does not allow it."""
        matcher = self._matchers.get(request_id)
        if matcher is not None:
            matcher.take([token_id])
