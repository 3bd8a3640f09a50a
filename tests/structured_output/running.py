"""One way to run constrained requests, alone or together."""

from __future__ import annotations

from typing import Any

from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import CompletionOutput
from octavo.messages import RequestOutputKind, SamplingParams, StructuredOutputsParams


def sampling(constraint: StructuredOutputsParams | None, **fields: Any) -> SamplingParams:
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 60, **fields}
    return SamplingParams(structured_outputs=constraint, output_kind=RequestOutputKind.FINAL_ONLY, **fields)


def run(engine: LLMEngine, *params: SamplingParams, prompt: str = "one small step") -> list[CompletionOutput]:
    """The first sample of each, all submitted at once."""
    for i, one in enumerate(params):
        engine.add_request(prompt, one, request_id=str(i))
    found: dict[str, CompletionOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] = output.outputs[0]
    engine.drain()
    return [found[str(i)] for i in range(len(params))]
