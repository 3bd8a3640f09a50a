"""POST /v1/chat/completions: messages in, one assistant message (or its chunks) a choice out."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from octavo.entrypoints.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
)
from octavo.entrypoints.openai.generation import Generation, response_id
from octavo.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.entrypoints.openai.prompts import encode_chat, output_budget, truncate
from octavo.entrypoints.openai.protocol import REFUSED_IN_CHAT, ChatRequest
from octavo.entrypoints.openai.routing import JsonRoute, server_state
from octavo.entrypoints.openai.sampling import sampling_params
from octavo.entrypoints.openai.sse import (
    CLIENT_CLOSED,
    DONE,
    EventStream,
    encode_event,
    json_response,
    until_disconnect,
)
from octavo.entrypoints.state import ServerState
from octavo.exceptions import ValidationError

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.outputs import CompletionOutput

logger = logging.getLogger("octavo.server")
router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_class=Response)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    state = server_state(request)
    engine = state.ready_engine()
    state.check_model(body.model)
    if unknown := body.refuse(REFUSED_IN_CHAT):
        logger.debug("ignored unknown fields of a chat request: %s", ", ".join(unknown))
    generation = await _prepare(state, engine, body)
    if body.stream:
        return EventStream(_chunks(generation, body))
    answer = await until_disconnect(request.receive, _complete(generation, body))
    return json_response(answer) if answer is not None else Response(status_code=CLIENT_CLOSED)


def _top_logprobs(body: ChatRequest) -> int | None:
    """How many alternatives a token gets; None without logprobs."""
    if not body.logprobs:
        if body.top_logprobs:
            raise ValidationError("top_logprobs needs logprobs to be true", parameter="top_logprobs")
        return None
    top = body.top_logprobs or 0
    if not 0 <= top <= 20:
        raise ValidationError(f"top_logprobs must be in [0, 20], got {top}", parameter="top_logprobs")
    return top


async def _prepare(state: ServerState, engine: AsyncLLM, body: ChatRequest) -> Generation:
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    requested: int | None = getattr(body, field)
    if requested is not None and requested < 1:
        raise ValidationError(f"{field} must be at least 1, got {requested}", parameter=field)
    limit = engine.info.max_model_len
    token_ids = await encode_chat(
        engine.tokenizer,
        body.messages,
        body,
        add_special_tokens=body.add_special_tokens,
        limit=limit if body.truncate_prompt_tokens is None else None,
    )
    token_ids = truncate(token_ids, body.truncate_prompt_tokens, requested or 1, limit)
    budget = output_budget(len(token_ids), requested, None, limit, prompt_field="messages", field=field)
    params = sampling_params(
        body,
        state.sampling_defaults,
        max_tokens=budget,
        logprobs=_top_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    identity = response_id("chatcmpl", body)
    try:
        return Generation(engine, body, [token_ids], [params], response_id=identity, model=state.model_name)
    except ValidationError as error:
        if error.parameter == "prompt":  # the engine's word for what the client gave as messages
            raise ValidationError(str(error), parameter="messages") from error
        raise


def _logprobs(generation: Generation, body: ChatRequest, choice: CompletionOutput) -> ChatLogprobs | None:
    if not body.logprobs or not choice.token_ids:
        return None
    return chat_logprobs(generation.tokenizer, choice.token_ids, choice.logprobs or [], body.top_logprobs or 0)


async def _complete(generation: Generation, body: ChatRequest) -> ChatCompletion:
    choices: dict[int, ChatChoice] = {}
    prompt_table: Any = UNSET
    async with aclosing(generation.outputs()) as outputs:
        async for _, output in outputs:
            if output.prompt_logprobs is not None:
                prompt_table = prompt_logprobs(output.prompt_logprobs)
            for choice in output.outputs:
                choices[choice.index] = ChatChoice(
                    index=choice.index,
                    message=AssistantMessage(content=choice.text),
                    logprobs=_logprobs(generation, body, choice),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if body.return_token_ids else UNSET,
                )
    return ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[choices[index] for index in sorted(choices)],
        usage=generation.counter.usage(),
        prompt_logprobs=prompt_table,
        prompt_token_ids=generation.prompts[0] if body.return_token_ids else UNSET,
    )


async def _chunks(generation: Generation, body: ChatRequest) -> AsyncGenerator[bytes, None]:
    """Per choice: role with empty content, deltas, one finish_reason; then usage if asked for, then [DONE]."""
    final_usage, running_usage = generation.stream_usage

    def event(choice: ChatChunkChoice | None, **more: Any) -> bytes:
        usage: Any = UNSET
        if running_usage or choice is None:
            usage = generation.counter.usage()
        elif final_usage:
            usage = None
        return encode_event(
            ChatChunk(
                id=generation.id,
                created=generation.created,
                model=generation.model,
                choices=[] if choice is None else [choice],
                usage=usage,
                **more,
            )
        )

    prompt_ids = generation.prompts[0] if body.return_token_ids else UNSET
    for index in range(generation.n):
        first = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        yield event(first, prompt_token_ids=prompt_ids)
    async with aclosing(generation.outputs()) as outputs:
        async for _, output in outputs:
            for choice in output.outputs:
                for chunk in _delta_chunks(generation, body, choice):
                    yield event(chunk)
    if final_usage:
        yield event(None)
    yield DONE


def _delta_chunks(generation: Generation, body: ChatRequest, choice: CompletionOutput) -> list[ChatChunkChoice]:
    """At most two chunks: the new text, and the end. Text held back for a stop string makes no chunk of its own."""
    chunks = []
    if choice.text or (choice.token_ids and (body.logprobs or body.return_token_ids)):
        chunks.append(
            ChatChunkChoice(
                index=choice.index,
                delta=Delta(content=choice.text),
                logprobs=_logprobs(generation, body, choice),
                token_ids=choice.token_ids if body.return_token_ids else UNSET,
            )
        )
    if choice.finish_reason is not None:
        chunks.append(
            ChatChunkChoice(
                index=choice.index,
                delta=Delta(),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
        )
    return chunks
