"""Prompts and answers in the log: only where the operator has asked for it (--enable-log-requests, -outputs)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.config import LogConfig

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestOutput
    from octavo.messages import SamplingParams
    from octavo.tokenizer.base import Tokenizer

logger = logging.getLogger("octavo.requests")


class Answering(Protocol):
    """The log of one request that is being answered."""

    def add(self, index: int, output: RequestOutput) -> None:
        """``output``, whose text is new, of prompt ``index``."""

    def close(self) -> None:
        """There will be no more."""


class RequestLog(Protocol):
    """The log of a server's requests."""

    def begin(
        self, name: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams], tokenizer: Tokenizer
    ) -> Answering:
        """A request is about to be answered; ``name`` is the answer's id."""


class NullRequestLog:
    """Writes nothing, of any request."""

    def begin(self, *_: object) -> Answering:
        return self

    def add(self, index: int, output: RequestOutput) -> None:
        pass

    def close(self) -> None:
        pass


class WritingRequestLog:
    """Writes what ``config`` asks for, each text cut to ``max_log_len`` characters."""

    def __init__(self, config: LogConfig) -> None:
        self._config = config

    def begin(
        self, name: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams], tokenizer: Tokenizer
    ) -> Answering:
        if self._config.enable_log_requests:
            for ids, one in zip(prompts, params, strict=True):
                text = self._cut(tokenizer.decode(ids, skip_special_tokens=False))
                logger.info("%s: prompt of %d tokens %r, %s", name, len(ids), text, one)
        return _WrittenAnswer(name, self._cut) if self._config.enable_log_outputs else NullRequestLog()

    def _cut(self, text: str) -> str:
        return text[: self._config.max_log_len]


class _WrittenAnswer:
    def __init__(self, name: str, cut: Callable[[str], str]) -> None:
        self._name, self._cut = name, cut
        self._texts: dict[tuple[int, int], list[str]] = {}
        self._reasons: dict[tuple[int, int], str | None] = {}

    def add(self, index: int, output: RequestOutput) -> None:
        for choice in output.outputs:
            self._texts.setdefault((index, choice.index), []).append(choice.text)
            self._reasons[index, choice.index] = choice.finish_reason

    def close(self) -> None:
        for (prompt, sample), pieces in sorted(self._texts.items()):
            text = "".join(pieces)
            reason = self._reasons[prompt, sample] or "unfinished"
            logger.info(
                "%s: output %d of prompt %d ended (%s): %r", self._name, sample, prompt, reason, self._cut(text)
            )


def request_log(config: LogConfig) -> RequestLog:
    """The log that ``config`` asks for."""
    wanted = config.enable_log_requests or config.enable_log_outputs
    return WritingRequestLog(config) if wanted else NullRequestLog()
