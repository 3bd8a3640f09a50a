"""An engine of this process runs requests to their end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import RequestOutput
from octavo.verify.cases import Case


@contextmanager
def open_engine(model: str, **settings: Any) -> Iterator[LLMEngine]:
    """An engine with what every way of running shares, and with ``settings``; shut down at the end."""
    base = {
        "model": model,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,  # room for every prompt in one piece
        "enable_prefix_caching": False,
    }
    engine = LLMEngine(resolve_engine_config(engine_config_from_kwargs(**base | settings), None))
    try:
        yield engine
    finally:
        engine.shutdown()


def run_cases(engine: LLMEngine, cases: Sequence[Case]) -> list[RequestOutput]:
    """All ``cases`` at once; their outputs in order."""
    return run_counted(engine, cases)[0]


def run_counted(engine: LLMEngine, cases: Sequence[Case]) -> tuple[list[RequestOutput], int]:
    """The outputs, and how many steps they took."""
    for number, case in enumerate(cases):
        engine.add_request(case.prompt, case.params, request_id=str(number))
    outputs, steps = {}, 0
    while engine.has_unfinished():
        outputs.update({output.request_id: output for output in engine.step()})
        steps += 1
    engine.drain()
    return [outputs[str(number)] for number in range(len(cases))], steps
