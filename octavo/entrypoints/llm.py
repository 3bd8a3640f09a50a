"""LLM: offline generation in this process, many prompts at once.

llm = LLM("smollm2-135m")
llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=32))
"""

from __future__ import annotations

import contextlib
import functools
import logging
import numbers
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.config import ChatConfig
from octavo.engine.input_processor import ParsedPrompt, Prompt, parse_prompt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.entrypoints.chat.chat_format import ChatFormats
from octavo.entrypoints.chat.prompts import ChatInput, chat_prompt
from octavo.entrypoints.sampling_defaults import read_sampling_defaults, sampling_overrides
from octavo.entrypoints.terminal import download_bar, interrupt_event
from octavo.exceptions import EngineDeadError, ValidationError
from octavo.messages import (
    BeamSearchParams,
    CacheOptions,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
    SchedulingOptions,
)
from octavo.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded. Keyword arguments are the fields of the config classes, e.g. ``max_model_len``,
    ``kv_cache_memory``, ``max_num_seqs``, ``threads``, ``seed``.

    Raises ConfigError for an unknown or wrong argument, ModelError if the model cannot be loaded. Use it as a context
    manager, or call :meth:`shutdown`. Calls from several threads run one after the other.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        if model is not None:
            kwargs["model"] = model
        config = engine_config_from_kwargs(**kwargs)
        with download_bar() as progress:
            config = resolve_engine_config(config, progress)
        sampling_overrides(config.sampling)  # wrong ones are told now
        engine = LLMEngine(config)
        self._engine: LLMEngine | None = engine
        self._defaults = functools.cache(lambda: read_sampling_defaults(config.model.model, config.sampling))
        tokenizer, chat = engine.tokenizer, ChatConfig(trust_request_chat_template=True)
        self._chat_formats = functools.cache(lambda: ChatFormats(tokenizer, chat))
        self._lock = threading.Lock()
        self._release = weakref.finalize(self, engine.shutdown)  # also at the interpreter's exit

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One finished RequestOutput per prompt, in order.

        A prompt is text, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids`` (and ``cache_salt``).
        One SamplingParams serves all prompts; a list gives each its own; without any, those of
        :meth:`get_default_sampling_params` do. ``priority`` has a number a prompt: the lowest goes first where the
        scheduler's policy heeds it. ``use_tqdm`` shows a progress bar. A sequence that fails alone has finish_reason
        "error" and the message as its stop_reason. Ctrl-C aborts all prompts, raises KeyboardInterrupt, and leaves the
        engine usable. Raises ValidationError before anything is computed.
        """
        parsed = [parse_prompt(item) for item in _as_prompts(prompts)]
        return self._run(parsed, self._as_params(sampling_params, len(parsed)), use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for one conversation or a list of them, through the model's chat template.

        Messages and tools are as in OpenAI's API, and become the prompt that the server would make of them. The
        template writes the special tokens itself; none are added.
        """
        tokenizer, formats, parsed = self.get_tokenizer(), self._chat_formats(), []
        for conversation in _as_conversations(messages):
            chat = ChatInput(
                messages=conversation,
                tools=tools or (),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            prompt = chat_prompt(tokenizer, formats, chat)
            parsed.append(ParsedPrompt(prompt.token_ids, prompt.text, None))
        return self._run(parsed, self._as_params(sampling_params, len(parsed)), use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What :meth:`generate` uses when it is given none: the model's own defaults, unless configured otherwise."""
        return SamplingParams(**self._defaults())

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, with the most probable sequences of a beam search instead of samples.

        ``outputs`` of each RequestOutput are the ``n`` best, best first, each with its ``cumulative_logprob``.
        """
        parsed = [parse_prompt(item) for item in _as_prompts(prompts)]
        listed = [params] if isinstance(params, BeamSearchParams) else params
        if isinstance(listed, str | Mapping) or not all(isinstance(one, BeamSearchParams) for one in listed):
            raise ValidationError("params must be BeamSearchParams, or a list", parameter="params")
        sampling = [one.sampling_params() for one in listed]
        chosen = sampling[0] if isinstance(params, BeamSearchParams) else sampling
        return self._run(parsed, self._as_params(chosen, len(parsed)), use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._live_engine().tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, in the pool and in tiers. True, as in vLLM where it could be done."""
        self._live_engine().reset_prefix_cache()
        return True

    def shutdown(self) -> None:
        """Release the model and its memory. Idempotent."""
        self._release()
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _live_engine(self) -> LLMEngine:
        if self._engine is None:
            raise EngineDeadError("this LLM is shut down")
        return self._engine

    def _as_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        """One for each of ``count`` prompts."""
        if params is None or isinstance(params, SamplingParams):
            return [params if params is not None else self.get_default_sampling_params()] * count
        if isinstance(params, str | Mapping) or not all(isinstance(one, SamplingParams) for one in params):
            raise ValidationError("sampling_params must be SamplingParams, or a list", parameter="sampling_params")
        _check_count("sampling_params", len(params), count)
        return params

    def _run(
        self,
        prompts: list[ParsedPrompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if priority is not None:
            _check_count("priority", len(priority), len(prompts))
        with self._lock:
            return self._run_alone(self._live_engine(), prompts, params, use_tqdm, priority or [0] * len(prompts))

    @staticmethod
    def _run_alone(
        engine: LLMEngine,
        prompts: list[ParsedPrompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        priority: Sequence[int],
    ) -> list[RequestOutput]:
        with _interruptible() as interrupted, _generation_bar(len(prompts), use_tqdm) as advance:
            done: dict[str, RequestOutput] = {}
            try:
                for index, (prompt, one) in enumerate(zip(prompts, params)):
                    engine.add_request(
                        prompt.prompt,
                        one.replace(output_kind=RequestOutputKind.FINAL_ONLY),
                        request_id=str(index),
                        prompt_text=prompt.text,
                        scheduling=SchedulingOptions(priority=priority[index]),
                        cache=CacheOptions(salt=prompt.cache_salt),
                    )
                while engine.has_unfinished() and not interrupted.is_set():
                    for output in engine.step():
                        done[output.request_id] = output
                        advance(output)
                if not interrupted.is_set():
                    engine.drain()
            finally:
                if engine.has_unfinished():
                    engine.abort_all()
        return [done[str(index)] for index in range(len(prompts))]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts; a single one (text, dict, or token ids) becomes a list of one. Any iterable is a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        listed: list[Any] = list(prompts)
    except TypeError:
        listed = [None]
    if isinstance(prompts, bytes) or any(one is None for one in listed):
        raise ValidationError("a prompt is text, a list of token ids, or a dict", parameter="prompt")
    return [listed] if listed and isinstance(listed[0], numbers.Integral) else listed


def _as_conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """A list of conversations; a single one becomes a list of one. Raises ValidationError for what is none."""
    conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
    for conversation in conversations or [[]]:
        if not conversation or isinstance(conversation, str) or not all(isinstance(m, Mapping) for m in conversation):
            raise ValidationError(
                "messages must be a list of dicts with role and content, or a list of such lists, none of them empty",
                parameter="messages",
            )
    return conversations  # type: ignore[return-value]


def _check_count(name: str, given: int, count: int) -> None:
    if given != count:
        raise ValidationError(f"{given} {name} for {count} prompts: give one, or one for each", parameter=name)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """``interrupt_event``; on leaving, the interrupt is raised. Where SIGINT is ignored, nothing changes."""
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):
        yield threading.Event()
        return
    with interrupt_event() as interrupted:
        yield interrupted
    if interrupted.is_set():
        previous(signal.SIGINT, None)
        raise KeyboardInterrupt


@contextlib.contextmanager
def _generation_bar(total: int, shown: bool) -> Iterator[Any]:
    """A function to call with each finished RequestOutput; draws on stderr, only if that is a terminal."""
    tokens = 0
    if not shown:
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("Prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, tokens=0)

        def advance(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(sample.token_ids) for sample in output.outputs)
            bar.update(task, advance=1, tokens=tokens)
            for sample in output.outputs:
                if sample.finish_reason == FinishReason.ERROR:
                    logger.error("prompt %s failed: %s", output.request_id, sample.stop_reason)

        yield advance
