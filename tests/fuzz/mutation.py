"""Strategies that damage well-formed input in the ways that files and requests are damaged."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
quick = settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)  # tests.fuzz.run takes its time
CORPUS = Path(__file__).parent / "corpus"
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    0x7F,
    0x80,
    0xFF,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**60,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def corpus(kind: str) -> list[bytes]:
    """The files of ``corpus/kind``: seeds, and what once failed."""
    return [path.read_bytes() for path in sorted((CORPUS / kind).iterdir())]


def mutate(data: bytes, seed: int, count: int, focus: int) -> bytes:
    """``count`` random changes, three of four of them within the first ``focus`` bytes."""
    chance, out = random.Random(seed), bytearray(data)
    for _ in range(count):
        end = len(out) if chance.random() < 0.25 else min(len(out), focus)
        at, size = chance.randrange(end + 1), chance.choice((1, 2, 4, 8, 16, 64))
        match chance.randrange(7):
            case 0:
                out[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                width = chance.choice((1, 2, 4, 8))
                number = chance.choice(NUMBERS) + chance.choice((-1, 0, 0, 1))
                out[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size]
            case 4:
                out[at:at] = chance.randbytes(size)
            case 5:
                other = chance.randrange(len(out) + 1)
                out[at : at + size] = out[other : other + size]
            case 6:
                del out[chance.randrange(len(out) + 1) :]
    return bytes(out)


def damaged(seeds: list[bytes], focus: int = 1 << 20) -> st.SearchStrategy[bytes]:
    """One of ``seeds``, changed in 1 to 12 places."""
    return st.builds(
        mutate, st.sampled_from(seeds), st.integers(0, 2**32 - 1), st.integers(1, 12), st.just(focus)
    ) | st.sampled_from(seeds)


ODD = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, -(2**64), 10**30, "", "x", "\x00", "\ud800", "NaN", "{{", "😀" * 9),
    *([], [[]], [None], ["x"] * 40, {}, {"type": "text"}, {"": ""}, {"type": None, "text": 5}, float("nan"), 1e308),
    *(float("inf"), "a" * 5000, {"a": {"a": {"a": {}}}}, ["x", 1, None], "function", "json_schema", "auto", "user"),
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in _places(one, (*at, key)))]


def twist(text: bytes, seed: int, count: int) -> bytes:
    """The JSON ``text`` with values replaced, removed, doubled or nested, and fields renamed."""
    chance, root = random.Random(seed), [json.loads(text)]
    for _ in range(count):
        *way, last = chance.choice(_places(root)[1:])
        parent: Any = root
        for step in way:
            parent = parent[step]
        match chance.randrange(6):
            case 0 | 1 | 2:
                parent[last] = copy.deepcopy(chance.choice(ODD))
            case 3 if len(way) > 0:
                del parent[last]
            case 4:
                parent[last] = [parent[last]] * chance.choice((1, 2, 9))
            case 5 if isinstance(parent, dict):
                parent[last + chance.choice(("_", "s", ""))] = parent.pop(last)
    return json.dumps(root[0] if root else None).encode()


def twisted(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of ``seeds``, which are JSON, with 1 to 4 parts changed: still JSON, but for NaN and the infinities."""
    return st.builds(twist, st.sampled_from(seeds), st.integers(0, 2**32 - 1), st.integers(1, 4))
