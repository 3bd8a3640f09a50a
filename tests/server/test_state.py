"""A server's models by name: which one a request gets, and what it hears before that is ready."""

from __future__ import annotations

import pytest

from octavo.entrypoints.server.state import NotReadyError, ServedModel, ServerState, UnknownModelError
from octavo.exceptions import EngineDeadError
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def first() -> ServedModel:
    return ServedModel("first", FakeEngine())  # type: ignore[arg-type]


@pytest.fixture
def second() -> ServedModel:
    return ServedModel("second")


def test_a_name_finds_its_model_and_none_the_first(first: ServedModel, second: ServedModel) -> None:
    second.engine = FakeEngine()  # type: ignore[assignment]
    state = ServerState([first, second])
    assert state.model() is state.model("first") is first
    assert state.model("second") is second


def test_each_model_is_ready_or_dead_by_itself(first: ServedModel, second: ServedModel) -> None:
    state = ServerState([first, second])
    assert state.find("second") is second
    with pytest.raises(NotReadyError):
        state.model("second")
    second.failure = "no such file"
    with pytest.raises(EngineDeadError, match="no such file"):
        state.model("second")
    assert state.model("first") is first


def test_an_unknown_name_is_told_what_there_is_once_the_default_is_ready(
    first: ServedModel, second: ServedModel
) -> None:
    with pytest.raises(UnknownModelError, match="the model 'x' does not exist; this server has 'first', 'second'"):
        ServerState([first, second]).model("x")
    with pytest.raises(NotReadyError):
        ServerState([second]).model("x")
