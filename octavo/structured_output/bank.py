"""Compiled grammars on the worker's side: made once on a thread of its own, copied for each request.

The thread has a low priority, and llguidance gives the GIL away while it compiles, so steps go on meanwhile. The
vocabulary is made with the first grammar. Knows nothing of how grammars are written, nor of requests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.exceptions import OctavoError, RequestError, ValidationError
from octavo.platforms.cpu import lower_thread_priority
from octavo.structured_output.cache import LruCache
from octavo.structured_output.compiler import compile_grammar, explain
from octavo.structured_output.vocabulary import model_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from octavo.tokenizer.base import Tokenizer

MAX_GRAMMARS = 64
MAX_TEXT = 8 << 20  # characters of all grammars together
STACK_BYTES = 64 << 20  # the compiler recurses: more than the checker had, so that what passed there passes here

# What the masks of one request may cost others: much more than any useful grammar takes, and not seconds.
BURST_SECONDS, SECONDS_PER_TOKEN = 0.5, 0.01

Mask = npt.NDArray[np.uint32]


class MaskBudget:
    """The CPU time that one request, all its samples together, may still spend on masks."""

    def __init__(self) -> None:
        self.seconds_left = BURST_SECONDS


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(self, state: LLMatcher, endings: Mask, budget: MaskBudget) -> None:
        self._state, self._endings, self._budget = state, endings, budget

    def fill(self, mask: Mask) -> bool:
        """Write the tokens that may come next, one bit each; True if there is nothing left but to end.

        ``mask`` is uint32 ``[ceil(size of the vocabulary / 32)]``. Raises ValidationError when the grammar is stuck
        or too much work.
        """
        if self._budget.seconds_left >= 0.0:
            start = time.thread_time()
            self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check(ValidationError)  # it has come to a limit of the parser
            self._budget.seconds_left += SECONDS_PER_TOKEN - (time.thread_time() - start)
        if self._budget.seconds_left < 0.0:
            message = "the grammar of structured_outputs takes too much work for every token; make it simpler"
            raise ValidationError(message, parameter="structured_outputs")
        return not (mask & ~self._endings).any()

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were allowed; after the end, by an EOS token. Raises RequestError for others."""
        for token_id in token_ids:
            self._state.consume_token(token_id)
        self._check(RequestError)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of ``token_ids`` may come next, one after the other. Changes nothing."""
        return self._state.validate_tokens(list(token_ids))

    def _check(self, kind: type[OctavoError]) -> None:
        if self._state.is_error():
            raise kind(f"the grammar of structured_outputs: {explain(self._state.get_error())}")


class GrammarBank:
    """Grammars by their text. Thread-safe; no method waits for a compilation but :meth:`matcher` of one not prepared.

    ``load_tokenizer`` is called once, with the first grammar. Masks have bits for ``vocab_size`` tokens at least.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load_tokenizer, self._vocab_size = load_tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._endings = np.zeros(0, np.uint32)
        self._lock = threading.Lock()
        self._cache: LruCache[str, Future[LLMatcher]] = LruCache(MAX_GRAMMARS, MAX_TEXT, lambda text, _: len(text))
        self._tasks: SimpleQueue[tuple[str, Future[LLMatcher]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """Compile ``grammar`` unless it is there; the future is done when :meth:`matcher` will not wait.

        It may hold the GrammarError that :meth:`matcher` would tell of.
        """
        with self._lock:
            future = self._cache.get(grammar)
            if future is None:
                future = Future()
                self._cache.put(grammar, future)
                self._start()
                self._tasks.put((grammar, future))
            return future

    def matcher(self, grammar: str, token_ids: Sequence[int], budget: MaskBudget) -> Matcher:
        """A matcher that has taken ``token_ids`` already. Raises RequestError if the grammar or they are wrong."""
        try:
            state = self.prepare(grammar).result().deep_copy()
        except Exception as error:
            raise RequestError(f"the grammar of structured_outputs does not compile: {error}") from error
        matcher = Matcher(state, self._endings, budget)
        if token_ids:
            matcher.take(token_ids)
        return matcher

    @property
    def mask_words(self) -> int:
        """Length of a mask; valid once a matcher was made."""
        return self._endings.size

    def close(self) -> None:
        """End the thread when it has compiled what it was given."""
        with self._lock:
            if self._thread is not None:
                self._tasks.put(None)

    def _start(self) -> None:
        if self._thread is None:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread = threading.Thread(target=self._serve, name="octavo-grammars", daemon=True)
                self._thread.start()
            finally:
                threading.stack_size(before)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            lower_thread_priority()
        while (task := self._tasks.get()) is not None:
            grammar, future = task
            try:
                future.set_result(compile_grammar(self._need_vocabulary(), grammar))
            except BaseException as error:
                future.set_exception(error)
            del task, future

    def _need_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            tokenizer = self._load_tokenizer()
            vocabulary = model_vocabulary(tokenizer, self._vocab_size)
            endings = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
            for token_id in tokenizer.eos_token_ids:
                endings[token_id // 32] |= np.uint32(1 << token_id % 32)
            self._vocabulary, self._endings = vocabulary, endings
        return self._vocabulary
