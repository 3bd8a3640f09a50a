"""Size budgets: the code stays readable by one person. Run with -n 0 -s to see the largest files and functions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LIMIT = 600  # an alarm: the rule is one concept a file
FUNCTION_LIMIT = 60
FAMILY_LIMIT = 120


def python_files() -> list[Path]:
    return sorted(p for folder in ("octavo", "tests", "benchmarks", "scripts") for p in (ROOT / folder).rglob("*.py"))


def native_files() -> list[Path]:
    return sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".inl"))


def file_limit(path: Path) -> int:
    name = path.relative_to(ROOT).as_posix()
    return FAMILY_LIMIT if name.startswith("octavo/models/families/") else FILE_LIMIT


def test_files_stay_within_their_budget() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in python_files() + native_files()}
    for path, lines in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
        print(f"{lines:5d}  {path.relative_to(ROOT)}")
    over = {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > file_limit(p)}
    assert not over


def test_functions_stay_within_their_budget() -> None:
    sizes: dict[str, int] = {}
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                sizes[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1  # type: ignore[operator]
    for name, lines in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
        print(f"{lines:5d}  {name}")
    assert {name: n for name, n in sizes.items() if n > FUNCTION_LIMIT} == {}


def test_every_module_says_what_it_is() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "octavo").rglob("*.py")
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert bare == []


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "NotImplementedError"])
def test_nothing_is_left_unfinished(word: str) -> None:
    pattern = re.compile(rf"\b{word}\b")
    files = [p for p in python_files() + native_files() if p != Path(__file__)]
    assert [str(p.relative_to(ROOT)) for p in files if pattern.search(p.read_text())] == []
