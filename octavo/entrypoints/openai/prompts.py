"""From a request's prompt to token ids that fit the model, and the messages of a refusal when they do not."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from octavo.entrypoints.chat.chat_format import ChatFormat, ChatFormats
from octavo.entrypoints.openai.chat_messages import plain_message
from octavo.entrypoints.openai.protocol import ChatMessage, TemplateOptions
from octavo.entrypoints.openai.tools import ToolUse, tool_use
from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import ServedModel
from octavo.exceptions import ValidationError
from octavo.tokenizer.base import Tokenizer

LONG_TEXT = 16 * 1024  # characters; longer texts are tokenised off the event loop,
VERY_LONG_TEXT = 256 * 1024  # and still longer ones one by one: the library needs up to 600 bytes a token
LONGEST_TEXT, LONGEST_TOKENS = 1024 * 1024, 16  # characters of one text, and in the mean of its tokens, at most
MANY_MESSAGES = 32  # longer conversations go through the template off the event loop
MAX_SEQUENCES = 1024  # prompts x n of one completions request
_very_long_texts = ThreadPoolExecutor(1, thread_name_prefix="very-long-texts")
RESERVED_VARIABLES = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}


async def encode(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, limit: int, fits: bool = True, field: str = "prompt"
) -> list[int]:
    """Token ids of ``text``; a long text does not hold up the other requests, and of very long ones there is one.

    Raises ValidationError, before the work, for a text that is longer than ``limit`` of the longest tokens, where it
    is to fit; and in any case for one that would take too much memory.
    """
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    least = -(-len(text) // tokenizer.longest_token)
    if fits and least > limit:
        raise ValidationError(
            f"this model's maximum context length is {limit} tokens; the prompt alone has at least {least}",
            parameter=field,
        )
    most = max(LONGEST_TEXT, LONGEST_TOKENS * limit)
    if len(text) > most:
        raise ValidationError(f"{field} has {len(text)} characters; at most {most} are tokenised", parameter=field)
    executor = None if len(text) <= VERY_LONG_TEXT else _very_long_texts
    work = functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return await asyncio.get_running_loop().run_in_executor(executor, work)


async def encode_prompts(
    tokenizer: Tokenizer,
    prompt: str | list[str] | list[int] | list[list[int]],
    *,
    n: int,
    add_special_tokens: bool,
    limit: int,
    fits: bool,
) -> list[list[int]]:
    """One list of token ids a prompt. An empty text is BOS where there is one; an empty list is a ValidationError.

    Where they are to fit, one of ``limit`` tokens or more is refused before the next one is tokenised.
    """
    listed: Sequence[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not listed:
        raise ValidationError("prompt must not be an empty list", parameter="prompt")
    if len(listed) > 1 and len(listed) * n > MAX_SEQUENCES:
        raise ValidationError(
            f"prompt has {len(listed)} entries and n (or best_of) is {n}; their product may be at most {MAX_SEQUENCES}",
            parameter="n" if n > MAX_SEQUENCES else "prompt",
        )
    encoded = []
    for one in listed:
        if isinstance(one, str):
            await asyncio.sleep(0)  # many short texts are a long one
            ids = await encode(tokenizer, one, add_special_tokens=add_special_tokens, limit=limit, fits=fits)
        else:
            ids = list(one)
        if fits:
            output_budget(len(ids), None, None, limit, prompt_field="prompt", field="max_tokens")
        if not ids:
            if not isinstance(one, str) or tokenizer.bos_token_id is None:
                raise ValidationError("prompt must not be empty", parameter="prompt")
            ids = [tokenizer.bos_token_id]
        encoded.append(ids)
    return encoded


@dataclass(frozen=True)
class ChatSetup:
    """How one conversation is shown to the model, and what it wants of its tools."""

    format: ChatFormat
    use: ToolUse
    variables: Mapping[str, Any]  # of the template


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


async def chat_setup(model: ServedModel, options: TemplateOptions, *, off_loop: bool = False) -> ChatSetup:
    """Check all that does not need the messages. Raises ValidationError naming the field.

    A template of the request's own is tried out off the event loop, which it could hold up on purpose; and many tools
    take a while to check.
    """
    if options.chat_template is None and not off_loop:
        return _setup(model, options)
    return await asyncio.to_thread(_setup, model, options)


def _setup(model: ServedModel, options: TemplateOptions) -> ChatSetup:
    formats = chat_formats(model)
    config, chosen = formats.config, formats.choose(options.chat_template)
    use = tool_use(
        options.tools or [], options.tool_choice, show_uncalled=not config.exclude_tools_when_tool_choice_none
    )
    if use.schemas and not chosen.takes_tools:
        raise ValidationError(
            "this model's chat template does not take tools; leave them out, or set tool_choice to none",
            parameter="tools",
        )
    if use.schemas and chosen.tools is None:
        raise ValidationError(
            "this server does not read tool calls of this model: its chat template shows no format that octavo knows, "
            "or --tool-call-parser is none; only tool_choice none is possible",
            parameter="tools",
        )
    return ChatSetup(chosen, use, {**config.template_variables, **_variables(options)})


def chat_formats(model: ServedModel) -> ChatFormats:
    """The formats of ``model``. Raises ConfigError for a wrong flag."""
    if model.chat_formats is None:
        model.chat_formats = ChatFormats(model.ready_engine().tokenizer, model.chat_config)
    return model.chat_formats


def _variables(options: TemplateOptions) -> dict[str, Any]:
    """What the request sets in the template."""
    variables: dict[str, Any] = {}
    if options.documents:
        variables["documents"] = options.documents
    if options.reasoning_effort is not None:
        thinking = options.reasoning_effort != "none"  # the two names that templates have for it
        variables |= {
            "reasoning_effort": options.reasoning_effort,
            "enable_thinking": thinking,
            "thinking": thinking,
        }
    extra = options.chat_template_kwargs or {}
    if reserved := RESERVED_VARIABLES & set(extra):
        raise ValidationError(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}", parameter="chat_template_kwargs"
        )
    return variables | extra


async def encode_chat(
    tokenizer: Tokenizer,
    messages: list[ChatMessage],
    options: TemplateOptions,
    setup: ChatSetup,
    *,
    add_special_tokens: bool,
    limit: int,
    fits: bool,
    off_loop: bool = False,
) -> ChatPrompt:
    """Render and tokenise; a long conversation does not hold up the other requests, nor does a request's own template.

    Raises what render_chat raises.
    """
    if len(messages) <= MANY_MESSAGES and options.chat_template is None and not off_loop:
        text = render_chat(tokenizer, messages, options, setup)
    else:
        text = await asyncio.to_thread(render_chat, tokenizer, messages, options, setup)
    ids = await encode(tokenizer, text, add_special_tokens=add_special_tokens, limit=limit, fits=fits, field="messages")
    return ChatPrompt(text, ids)


async def chat_token_ids(
    context: RequestContext,
    model: ServedModel,
    messages: list[ChatMessage],
    options: TemplateOptions,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """What the model would read of a conversation."""
    setup = await chat_setup(model, options, off_loop=context.large_body)
    engine = model.ready_engine()
    prompt = await encode_chat(
        engine.tokenizer,
        messages,
        options,
        setup,
        add_special_tokens=add_special_tokens,
        limit=engine.info.max_model_len,
        fits=False,
        off_loop=context.large_body,
    )
    return prompt.token_ids


def render_chat(tokenizer: Tokenizer, messages: list[ChatMessage], options: TemplateOptions, setup: ChatSetup) -> str:
    """The prompt text of ``messages``. Raises ValidationError for no messages, other content than text, no template."""
    if not messages:
        raise ValidationError("messages must not be empty", parameter="messages")
    generate = options.add_generation_prompt
    if options.continue_final_message:
        if generate and "add_generation_prompt" in options.model_fields_set:
            raise ValidationError(
                "add_generation_prompt and continue_final_message exclude each other",
                parameter="continue_final_message",
            )
        generate = False
    return tokenizer.apply_chat_template(
        [plain_message(i, m, setup.format) for i, m in enumerate(messages)],
        add_generation_prompt=generate,
        continue_final_message=options.continue_final_message,
        chat_template=setup.format.template,
        tools=setup.use.shown or None,
        **setup.variables,
    )


def truncate(
    token_ids: list[int], keep: int | None, max_tokens: int, limit: int, *, side: str | None = "left"
) -> list[int]:
    """The last ``keep`` tokens (the first ones if ``side`` is right); -1 keeps what fits beside ``max_tokens``."""
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, limit - max_tokens)
    if keep == 0:
        raise ValidationError("truncate_prompt_tokens = 0 leaves no prompt", parameter="truncate_prompt_tokens")
    return token_ids[:keep] if side == "right" else token_ids[-keep:]


def output_budget(
    num_prompt_tokens: int, requested: int | None, default: int | None, limit: int, *, prompt_field: str, field: str
) -> int:
    """How many tokens may be generated: as requested, else ``default``, else all that the context holds.

    Raises ValidationError with limit, prompt and request in the message when they do not fit together.
    """
    room = limit - num_prompt_tokens
    if room < 1:
        raise ValidationError(
            f"this model's maximum context length is {limit} tokens; the prompt alone has {num_prompt_tokens}, "
            "which leaves no room for an answer",
            parameter=prompt_field,
        )
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        raise ValidationError(
            f"this model's maximum context length is {limit} tokens; {num_prompt_tokens + requested} were requested "
            f"({num_prompt_tokens} in the prompt, {field} {requested})",
            parameter=field,
        )
    return requested
