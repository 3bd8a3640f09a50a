"""From another protocol's request to a ChatRequest, so that every protocol is checked, rendered and run in one way.

Errors come back under the names that the client used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic

from octavo.entrypoints.http.field_errors import describe_fields
from octavo.entrypoints.openai.protocol import REFUSED_IN_CHAT, ChatRequest
from octavo.exceptions import ValidationError


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Within, a ValidationError about a field of chat becomes one about the field that ``names`` has for it."""
    try:
        yield
    except ValidationError as error:
        own = names.get(error.parameter or "")
        if own is None:
            raise
        message = str(error)
        if message.startswith(str(error.parameter)):
            message = own + message.removeprefix(str(error.parameter))
        raise ValidationError(message, parameter=own) from error


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
