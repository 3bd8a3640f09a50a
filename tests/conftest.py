"""Fixtures shared by all tests, and which tests follow each other in one of the worker processes (pytest-xdist)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

# Made once, so the tests that use one of them are together, all in one process.
SHARED = ("case_server", "case_llm", "shared_server")
# What takes longest goes first, so that no process works on alone at the end.
FIRST = ("invariance", "cases", "faults", "server", "engine", "property", "cli")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by the server or engine that they share, or else by file: a file's fixtures are made once, too."""
    for item in items:
        used = getattr(item, "fixturenames", ())
        group = "shared" if any(name in used for name in SHARED) else item.path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    folder = item.path.parent.name
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Write lone surrogates as escapes, in what tests have logged and printed: reports cross processes as UTF-8."""
    report = yield
    return _encodable(report)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_encodable, value))
    return value


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Path of the default model's GGUF file, fetched into the ordinary cache the first time."""
    from octavo.catalog import resolve_model

    return resolve_model("smollm2-135m", None, None)
