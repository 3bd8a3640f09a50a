"""From messages or texts to token ids that fit the model, and the messages of a refusal when they do not.

    ChatInput ── chat_setup ──▶ ChatSetup ── render_chat, encode ──▶ ChatPrompt

The server does each step off the event loop where it may take long; ``chat_prompt`` does all of them at once.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from octavo.entrypoints.chat.chat_format import ChatFormat, ChatFormats
from octavo.entrypoints.chat.tools import Tool, ToolChoice, ToolUse, tool_use
from octavo.entrypoints.server.state import ServedModel
from octavo.exceptions import ValidationError
from octavo.tokenizer.base import Tokenizer

LONG_TEXT = 16 * 1024  # characters; longer texts are tokenised off the event loop,
VERY_LONG_TEXT = 256 * 1024  # and still longer ones one by one: the library needs up to 600 bytes a token
LONGEST_TEXT, LONGEST_TOKENS = 1024 * 1024, 16  # characters of one text, and in the mean of its tokens, at most
MANY_MESSAGES = 32  # longer conversations go through the template off the event loop
MAX_SEQUENCES = 1024  # prompts x n of one completions request
_very_long_texts = ThreadPoolExecutor(1, thread_name_prefix="very-long-texts")
KNOWN_FIELDS = frozenset(
    {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content"}  # of a message
)
RESERVED_VARIABLES = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}

ChatMessage = Mapping[str, Any]  # a message as in OpenAI's API: role, content, tool_calls, ...


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


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """A conversation, and how it is shown to the model; messages and tools are plain objects as in OpenAI's API.

    ``add_generation_prompt`` is None where the client did not say; then the prompt asks for an answer unless the last
    message is continued.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None  # in place of the model's own
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False  # most templates write them themselves
    large: bool = False  # so large that work on it leaves the event loop


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


def chat_prompt(tokenizer: Tokenizer, formats: ChatFormats, chat: ChatInput) -> ChatPrompt:
    """The prompt of a conversation whose answer is not searched for calls.

    Raises ValidationError for tools that the template does not take, for content other than text, and where there is
    no template, or it fails.
    """
    text = render_chat(tokenizer, chat, setup_of(formats, chat, reads_calls=False))
    return ChatPrompt(text, tokenizer.encode(text, add_special_tokens=chat.add_special_tokens))


async def chat_setup(model: ServedModel, chat: ChatInput) -> ChatSetup:
    """Check all that does not need the messages. Raises ValidationError naming the field.

    A template of the request's own is tried out off the event loop, which it could hold up on purpose; and many tools
    take a while to check.
    """
    formats = chat_formats(model)
    if chat.chat_template is None and not chat.large:
        return setup_of(formats, chat)
    return await asyncio.to_thread(setup_of, formats, chat)


def setup_of(formats: ChatFormats, chat: ChatInput, *, reads_calls: bool = True) -> ChatSetup:
    """``reads_calls``: tools are refused where their calls could not be read. Raises ValidationError."""
    config, chosen = formats.config, formats.choose(chat.chat_template)
    use = tool_use(chat.tools, chat.tool_choice, show_uncalled=not config.exclude_tools_when_tool_choice_none)
    if use.schemas and not chosen.takes_tools:
        raise ValidationError(
            "this model's chat template does not take tools; leave them out, or set tool_choice to none",
            parameter="tools",
        )
    if use.schemas and chosen.tools is None and reads_calls:
        raise ValidationError(
            "this server does not read tool calls of this model: its chat template shows no format that octavo knows, "
            "or --tool-call-parser is none; only tool_choice none is possible",
            parameter="tools",
        )
    return ChatSetup(chosen, use, {**config.template_variables, **_variables(chat)})


def chat_formats(model: ServedModel) -> ChatFormats:
    """The formats of the served model. Raises ConfigError for a wrong flag."""
    if model.chat_formats is None:
        model.chat_formats = ChatFormats(model.ready_engine().tokenizer, model.chat_config)
    return model.chat_formats


def _variables(chat: ChatInput) -> dict[str, Any]:
    """What the request sets in the template."""
    variables: dict[str, Any] = {}
    if chat.documents:
        variables["documents"] = chat.documents
    if chat.reasoning_effort is not None:
        thinking = chat.reasoning_effort != "none"  # the two names that templates have for it
        variables |= {"reasoning_effort": chat.reasoning_effort, "enable_thinking": thinking, "thinking": thinking}
    extra = dict(chat.chat_template_kwargs or {})
    if reserved := RESERVED_VARIABLES & set(extra):
        raise ValidationError(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}", parameter="chat_template_kwargs"
        )
    return variables | extra


async def encode_chat(tokenizer: Tokenizer, chat: ChatInput, setup: ChatSetup, *, limit: int, fits: bool) -> ChatPrompt:
    """Render and tokenise; a long conversation does not hold up the other requests, nor does a request's own template.

    ``fits``: the prompt must fit into ``limit`` tokens. Raises what render_chat and encode raise.
    """
    if len(chat.messages) <= MANY_MESSAGES and chat.chat_template is None and not chat.large:
        text = render_chat(tokenizer, chat, setup)
    else:
        text = await asyncio.to_thread(render_chat, tokenizer, chat, setup)
    special = chat.add_special_tokens
    ids = await encode(tokenizer, text, add_special_tokens=special, limit=limit, fits=fits, field="messages")
    return ChatPrompt(text, ids)


async def chat_token_ids(model: ServedModel, chat: ChatInput) -> list[int]:
    """What the model would read of a conversation, which need not fit."""
    setup = await chat_setup(model, chat)
    engine = model.ready_engine()
    prompt = await encode_chat(engine.tokenizer, chat, setup, limit=engine.info.max_model_len, fits=False)
    return prompt.token_ids


def render_chat(tokenizer: Tokenizer, chat: ChatInput, setup: ChatSetup) -> str:
    """The prompt text of the messages. Raises ValidationError for no messages, other content than text, no template."""
    if not chat.messages:
        raise ValidationError("messages must not be empty", parameter="messages")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise ValidationError(
            "add_generation_prompt and continue_final_message exclude each other", parameter="continue_final_message"
        )
    return tokenizer.apply_chat_template(
        [_plain_message(i, m, setup.format) for i, m in enumerate(chat.messages)],
        add_generation_prompt=chat.add_generation_prompt is not False and not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        chat_template=setup.format.template,
        tools=setup.use.shown or None,
        **setup.variables,
    )


def _plain_message(index: int, message: ChatMessage, chat_format: ChatFormat) -> dict[str, Any]:
    """Message ``index`` for the template. Raises ValidationError for content that is not text.

    ``developer`` is ``system``. Text parts are joined by newlines unless the template takes parts. Arguments of calls
    are objects, or text where the template wants that; what is no JSON stays the text that it is.
    """
    plain = {name: value for name, value in message.items() if name not in KNOWN_FIELDS}
    if (role := message.get("role")) is not None:  # else the template says what it lacks
        plain["role"] = "system" if role == "developer" else role
    plain["content"] = _content(index, message, chat_format)
    for name in ("name", "tool_call_id"):
        if (value := message.get(name)) is not None:
            plain[name] = value
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, chat_format) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}  # templates know it by either name
    return plain


def _content(index: int, message: ChatMessage, chat_format: ChatFormat) -> Any:
    content = message.get("content")
    if not isinstance(content, list):
        text = content or ""
        return text if chat_format.takes_text else [{"type": "text", "text": text}]
    texts = []
    for part in content:
        kind = str(part.get("type"))[:40] if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or part.get("text") is None:
            raise ValidationError(
                f"messages[{index}]: content parts of type {kind!r} are not supported; only text is",
                parameter="messages",
            )
        texts.append(part["text"])
    return [{"type": "text", "text": text} for text in texts] if chat_format.takes_parts else "\n".join(texts)


def _call(call: Mapping[str, Any], chat_format: ChatFormat) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)  # some other shape, which the template may know
    arguments: Any = function.get("arguments", "")
    if chat_format.arguments_as_text:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = function.get("arguments", "")
    own = {name: value for name, value in function.items() if name not in ("name", "arguments")}
    plain = {name: value for name, value in call.items() if name not in ("id", "type", "function")}
    if call.get("id") is not None:
        plain["id"] = call["id"]
    called = {**own, "name": function.get("name"), "arguments": arguments}
    return {**plain, "type": call.get("type", "function"), "function": called}


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
