"""One engine in this process for one person: text comes out as it is made, Ctrl-C stops the answer only."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.args.engine_args import engine_config_from_namespace
from octavo.args.resolve import resolve_engine_config
from octavo.config import ChatConfig
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.entrypoints.chat.chat_format import ChatFormats
from octavo.entrypoints.chat.prompts import ChatInput, chat_prompt
from octavo.entrypoints.sampling_defaults import read_sampling_defaults
from octavo.entrypoints.terminal import download_bar, interrupt_event
from octavo.messages import RequestOutputKind, SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """The flags that chat and generate share."""
    group = parser.add_argument_group("sampling")
    bound = "up to the context's end" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"longest answer, in tokens (default: {bound})"
    )
    group.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own, else 0)")
    group.add_argument("--top-p", type=float, help="nucleus (default: the model's own, else off)")
    group.add_argument("--top-k", type=int, help="likeliest tokens only (default: the model's own, else off)")
    group.add_argument("--stop", action="append", default=[], help="end the answer before this text (repeatable)")


class Session:
    """A loaded model, and the sampling that the flags and the model ask for. Raises ConfigError and ModelError."""

    def __init__(self, namespace: argparse.Namespace) -> None:
        config = engine_config_from_namespace(namespace)
        with download_bar() as progress:
            config = resolve_engine_config(config, progress)
        self.model_name = config.model.served_model_name
        chosen: dict[str, Any] = {"temperature": 0.0, **read_sampling_defaults(config.model.model, config.sampling)}
        given = {name: getattr(namespace, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        chosen.update({name: value for name, value in given.items() if value is not None})
        self.params = SamplingParams(**chosen, stop=namespace.stop, output_kind=RequestOutputKind.DELTA)
        self.engine = LLMEngine(config)
        tokenizer = self.engine.tokenizer
        self._chat_formats = functools.cache(lambda: ChatFormats(tokenizer, ChatConfig()))

    def stream(self, prompt: str | Sequence[int]) -> Iterator[RequestOutput]:
        """The news of the answer to ``prompt``. Ctrl-C ends the stream between two steps. Raises ValidationError."""
        self.engine.add_request(prompt, self.params)
        with interrupt_event() as interrupted:
            try:
                while self.engine.has_unfinished() and not interrupted.is_set():
                    yield from self.engine.step()
            finally:
                if self.engine.has_unfinished():
                    self.engine.abort_all()
                self.engine.drain()

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation that the assistant is to continue. Raises ValidationError without a template."""
        return chat_prompt(self.engine.tokenizer, self._chat_formats(), ChatInput(messages=messages)).token_ids

    def close(self) -> None:
        self.engine.shutdown()
