"""LLM: offline generation in this process, many prompts at once.

llm = LLM("smollm2-135m")
llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=32))
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.entrypoints.progress import download_bar
from octavo.exceptions import EngineDeadError, ValidationError
from octavo.messages import FinishReason, RequestOutputKind, SamplingParams
from octavo.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded. Keyword arguments are the fields of the config classes, e.g. ``max_model_len``,
    ``kv_cache_memory``, ``max_num_seqs``, ``threads``, ``seed``.

    Raises ConfigError for an unknown or wrong argument, ModelError if the model cannot be loaded. Use it as a context
    manager, or call :meth:`shutdown`. Not thread-safe.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        if model is not None:
            kwargs["model"] = model
        config = engine_config_from_kwargs(**kwargs)
        with download_bar() as progress:
            config = resolve_engine_config(config, progress)
        engine = LLMEngine(config)
        self._engine: LLMEngine | None = engine
        self._release = weakref.finalize(self, engine.shutdown)  # also at the interpreter's exit

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One finished RequestOutput per prompt, in order.

        A prompt is text, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids`` (and ``cache_salt``).
        One SamplingParams serves all prompts; a list gives each its own. ``use_tqdm`` shows a progress bar. A sequence
        that fails alone has finish_reason "error" and the message as its stop_reason. Ctrl-C aborts all prompts, raises
        KeyboardInterrupt, and leaves the engine usable. Raises ValidationError before anything is computed.
        """
        items = _as_prompts(prompts)
        return self._run([_parse_prompt(item) for item in items], _as_params(sampling_params, len(items)), use_tqdm)

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

        The template writes the special tokens itself; none are added.
        """
        if not messages:
            raise ValidationError("messages must not be empty", parameter="messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        parsed = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
            )
            parsed.append({"prompt": tokenizer.encode(text, add_special_tokens=False), "prompt_text": text})
        return self._run(parsed, _as_params(sampling_params, len(parsed)), use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._live_engine().tokenizer

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

    def _run(
        self, prompts: list[dict[str, Any]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        engine = self._live_engine()
        with _interruptible() as interrupted, _generation_bar(len(prompts), use_tqdm) as advance:
            done: dict[str, RequestOutput] = {}
            try:
                for index, (prompt, one) in enumerate(zip(prompts, params)):
                    kind = RequestOutputKind.FINAL_ONLY
                    engine.add_request(params=one.replace(output_kind=kind), request_id=str(index), **prompt)
                while engine.has_unfinished() and not interrupted.is_set():
                    for output in engine.step():
                        done[output.request_id] = output
                        advance(output)
                if not interrupted.is_set():
                    engine.settle()
            finally:
                if engine.has_unfinished():
                    engine.abort_all()
        return [done[str(index)] for index in range(len(prompts))]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts; a single one (text, dict, or token ids) becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and not isinstance(prompts[0], str | Mapping | Sequence):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _parse_prompt(prompt: Prompt) -> dict[str, Any]:
    """Arguments of LLMEngine.add_request. Raises ValidationError for unknown keys."""
    if not isinstance(prompt, Mapping):
        return {"prompt": prompt}
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
        raise ValidationError(
            f"a prompt dict has prompt or prompt_token_ids, and perhaps cache_salt; got {sorted(prompt)}",
            parameter="prompt",
        )
    parsed = {"prompt": prompt.get("prompt_token_ids", prompt.get("prompt")), "cache_salt": prompt.get("cache_salt")}
    if "prompt_token_ids" in prompt:
        parsed["prompt_text"] = prompt.get("prompt")
    return parsed


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValidationError(
            f"{len(params)} sampling_params for {count} prompts: give one, or one for each", parameter="sampling_params"
        )
    return params


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C only sets the event, so that no step is torn; on leaving, it is raised.

    A second Ctrl-C is raised at once. Outside the main thread, and where SIGINT is ignored, nothing changes.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield interrupted
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted.is_set() and callable(previous):
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
