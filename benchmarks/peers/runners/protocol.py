"""How compare.py talks with an engine in another virtual environment: one JSON object a line.

The runner says {"ready": true, "version": ..., "load_s": ...} once, then answers each job {"prompts": [[ids]],
"max_tokens": n} with {"seconds": s, "tokens": n} or {"error": text}. Standard library only: every environment has its
own packages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], int]  # (prompts, tokens each) -> tokens made


def serve(load: Callable[[], tuple[str, Generate]]) -> None:
    """Load the engine (its version, its function), then generate until stdin ends. What it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    version, generate = load()
    _say(answers, {"ready": True, "version": version, "load_s": time.perf_counter() - start})
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        try:
            made = generate(job["prompts"], job["max_tokens"])
        except Exception as error:
            _say(answers, {"error": repr(error)})
            continue
        _say(answers, {"seconds": time.perf_counter() - start, "tokens": made})


def _say(answers: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=answers, flush=True)  # type: ignore[call-overload]
