"""The table of queries: each struct has a handler, and each handler says what it takes and gives."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from octavo import messages
from octavo.config import SchedulerConfig
from octavo.core.queries import HANDLERS, CoreState
from octavo.messages import CacheQuery, ListPrefixes, Query, SetPin
from octavo.messages.query import AnyAnswer
from octavo.utils.registry import resolve
from tests.core.checking_worker import Loop, cache_config, make_request
from tests.core.test_cache_queries import Clock


def test_every_query_has_a_handler() -> None:
    public = (getattr(messages, name) for name in messages.__all__)
    queries = {one for one in public if isinstance(one, type) and issubclass(one, Query)}
    assert set(HANDLERS) == queries - {Query, CacheQuery}


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


class RunningIds(Query[list[str]], frozen=True, tag=True):
    """A query that is not about the cache."""


def running_ids(query: RunningIds, core: CoreState) -> list[str]:
    return [request.request_id for request in core.running]


def test_a_query_about_something_else_sees_what_runs_and_leaves_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, RunningIds, f"{__name__}:running_ids")
    clock = Clock()
    one_seat = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=40)
    loop = Loop(one_seat, cache_config(4), num_blocks=41, max_model_len=60, clock=clock)
    for name in ("a", "b"):
        loop.add(make_request(name, [1, 2, 3], max_tokens=2))
    loop.scheduler.ask(SetPin(60.0, prompt_token_ids=[1, 2, 3, 4]))
    assert loop.scheduler.ask(RunningIds()).answer == []
    loop.step()
    assert loop.scheduler.ask(RunningIds()).answer == ["a"], "b waits for a's seat"
    loop.run()
    assert loop.scheduler.ask(RunningIds()).answer == []
    clock.now += 60
    loop.scheduler.ask(RunningIds())
    assert loop.scheduler.seconds_to_expiry == 0
    loop.scheduler.ask(ListPrefixes(1))
    assert loop.scheduler.seconds_to_expiry is None
