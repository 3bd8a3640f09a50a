"""From OpenAI's shapes, which other APIs put their requests into, to the terms of ``chat``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from octavo.entrypoints.api.shared.shapes import (
    REFUSED_IN_CHAT,
    ChatMessage,
    ChatRequest,
    GenerationRequest,
    TemplateOptions,
)
from octavo.entrypoints.chat.conversation import ChatTask
from octavo.entrypoints.chat.prompts import ChatInput
from octavo.entrypoints.chat.reading import ReplyOptions
from octavo.entrypoints.chat.sampling import CLIENT_FIELDS, GenerationOptions, renamed
from octavo.entrypoints.http.field_errors import describe_fields
from octavo.entrypoints.server.context import RequestContext
from octavo.exceptions import ValidationError
from octavo.messages import CacheOptions, ReportOptions, SchedulingOptions, Tenant


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """``fields`` that are not None as a checked ChatRequest. Raises ValidationError under the client's names."""
    with renamed(names):
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            request = ChatRequest.model_validate(given)
        except pydantic.ValidationError as error:
            message, parameter = describe_fields(error.errors(), given)
            raise ValidationError(message, parameter=parameter) from None
        request.refuse(REFUSED_IN_CHAT)
    return request


async def chat_task(context: RequestContext, body: ChatRequest) -> ChatTask:
    """What ``body`` asks for."""
    reply = ReplyOptions(
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning is not False,
        echo=bool(body.echo),
    )
    chat = await chat_input(context, body.messages, body, add_special_tokens=body.add_special_tokens)
    return ChatTask(chat, generation_options(context, body), reply)


async def chat_input(
    context: RequestContext, messages: Sequence[ChatMessage], body: TemplateOptions, *, add_special_tokens: bool = False
) -> ChatInput:
    """``messages`` and the options of ``body`` as plain objects; a large body does not hold up the other requests."""
    large = context.large_body
    plain, tools = await asyncio.to_thread(_plain, messages, body) if large else _plain(messages, body)
    choice, generate = body.tool_choice, body.add_generation_prompt
    told = "add_generation_prompt" in body.model_fields_set or not generate
    return ChatInput(
        messages=plain,
        tools=tools,
        tool_choice=choice if choice is None or isinstance(choice, str) else choice.model_dump(),
        documents=body.documents,
        reasoning_effort=body.reasoning_effort,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=generate if told else None,
        continue_final_message=body.continue_final_message,
        add_special_tokens=add_special_tokens,
        large=large,
    )


def _plain(messages: Sequence[ChatMessage], body: TemplateOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages, tools) with the fields that the client gave."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    return [message.model_dump(exclude_unset=True) for message in messages], tools


def generation_options(context: RequestContext, body: GenerationRequest) -> GenerationOptions:
    """What body and headers say of the generation, whatever its prompts are."""
    given = {name: value for name in CLIENT_FIELDS if (value := getattr(body, name)) is not None}
    own: int | None = getattr(body, "max_completion_tokens", None)
    scheduling = SchedulingOptions(
        priority=body.priority, tenant=Tenant(context.tenant), timeout=context.shortest_timeout(body.timeout)
    )
    return GenerationOptions(
        sampling=given,
        use_beam_search=bool(body.use_beam_search),
        best_of=body.best_of,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
        response_format=body.response_format,
        structured_outputs=body.structured_outputs,
        extra_args=body.vllm_xargs,
        max_tokens=body.max_tokens if own is None else own,
        max_tokens_field="max_tokens" if own is None else "max_completion_tokens",
        prompt_logprobs=body.prompt_logprobs,
        keep_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        stream=bool(body.stream),
        request_id=body.request_id,
        scheduling=scheduling,
        cache=CacheOptions(salt=body.cache_salt),
        report=ReportOptions(cache_miss=bool(body.return_cache_report)),
    )
