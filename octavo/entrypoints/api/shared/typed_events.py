"""What APIs of typed, named events share: a builder turns a conversation's news into them and keeps the whole.

Streams send what the builder yields; whole answers are what it has become by the end. Knows neither of them.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.chat.conversation import ChatEvent, Conversation
from octavo.entrypoints.http.errors import Failure
from octavo.entrypoints.http.sse import respond

Event = TypeVar("Event")
Event_co = TypeVar("Event_co", covariant=True)


class Builder(Protocol, Generic[Event_co]):
    """Events of one answer, in order: ``start``, then ``feed`` for each piece of news, then ``finish``."""

    def start(self) -> Iterator[Event_co]: ...

    def feed(self, news: ChatEvent) -> Iterator[Event_co]: ...

    def finish(self) -> Iterator[Event_co]: ...

    def whole(self) -> object:
        """The answer as it stands."""
        ...


async def answer(
    request: Request,
    conversation: Conversation,
    builder: Builder[Event],
    *,
    stream: bool,
    encode: Callable[[Event], bytes],
    on_error: Callable[[Failure], bytes],
) -> Response:
    """Run ``conversation``: a stream of its events, or one whole answer."""
    whole = functools.partial(_whole, conversation, builder)
    events = functools.partial(_events, conversation, builder, encode)
    return await respond(request, whole, events, on_error, stream=stream)


async def _whole(conversation: Conversation, builder: Builder[Event]) -> object:
    async with aclosing(conversation.events()) as events:
        async for news in events:
            work: Callable[[], object] = functools.partial(deque, builder.feed(news), maxlen=0)
            if conversation.reply.logprobs:  # there may be very many
                await asyncio.to_thread(work)
            else:
                work()
    return builder.whole()


async def _events(
    conversation: Conversation, builder: Builder[Event], encode: Callable[[Event], bytes]
) -> AsyncGenerator[bytes, None]:
    for event in builder.start():
        yield encode(event)
    async with aclosing(conversation.events()) as events:
        async for news in events:
            for event in builder.feed(news):
                yield encode(event)
    for event in builder.finish():
        yield encode(event)
