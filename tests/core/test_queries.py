"""The table of queries: each struct has a handler, and each handler says what it takes and gives."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from octavo import messages
from octavo.core.queries import HANDLERS
from octavo.messages import Query
from octavo.messages.query import AnyAnswer
from octavo.utils.registry import resolve


def test_every_query_has_a_handler() -> None:
    public = (getattr(messages, name) for name in messages.__all__)
    queries = {one for one in public if isinstance(one, type) and issubclass(one, Query)}
    assert set(HANDLERS) == queries - {Query}


@pytest.mark.parametrize("query", HANDLERS, ids=lambda query: query.__name__)
def test_a_query_says_how_the_answers_of_several_cores_become_one(query: type[Query[object]]) -> None:
    assert query.merge is not Query.merge


@pytest.mark.parametrize("query", HANDLERS, ids=lambda query: query.__name__)
def test_a_handler_takes_its_query_and_gives_what_can_travel(query: type[Query[object]]) -> None:
    hints = get_type_hints(resolve(HANDLERS[query]))
    assert hints["query"] is query
    answers = get_args(hints["return"]) or (hints["return"],)
    assert set(answers) <= set(get_args(AnyAnswer))
    (declared,) = get_args(query.__orig_bases__[0])  # type: ignore[attr-defined]
    assert set(answers) == set(get_args(declared) or (declared,))
