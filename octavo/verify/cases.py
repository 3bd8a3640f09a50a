"""The requests that ``octavo verify`` sends: mixed, growing out of their blocks, and repeating themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.messages import BeamSearch, RequestOutputKind, SamplingParams
from octavo.tokenizer.base import Tokenizer

TEXT = (
    "The river rose in the hills and ran for three days before it met the sea. Along its banks stood mills, each with "
    "a wheel of a different size; the miller of the smallest one kept a book in which he wrote, every evening, how "
    "much corn had been ground and who had brought it. On the 17th of March 1832 he noted: 'Two sacks, wet. 4 pence.' "
)
LENGTHS = (5, 16, 17, 32, 33, 48, 7, 64, 90, 128, 150, 31, 200, 3, 72, 110)
SHARED = 48  # tokens with which the longer prompts begin alike, so that the prefix cache has work


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: list[int]
    params: SamplingParams


def make_cases(tokenizer: Tokenizer, *, quick: bool) -> list[Case]:
    """16 requests (quick: 6) of mixed lengths: greedy, seeded sampling, penalties, n = 4, beams; all with logprobs."""
    ids = tokenizer.encode(TEXT * 8, add_special_tokens=False)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 11, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    ]
    lengths = LENGTHS[:16:3] if quick else LENGTHS
    cases = []
    for number, length in enumerate(lengths):
        start = 0 if length < SHARED else SHARED + 5 * number
        prompt = (ids[:SHARED] + ids[start:])[:length]
        beams = number % 6 == 3  # of the greedy kind
        params = SamplingParams(
            **kinds[number % 3],
            n=4 if number % 6 == 1 else 1,
            beam_search=BeamSearch(beam_width=3) if beams else None,
            max_tokens=8 if quick else 24,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if number % 5 == 4 and not beams else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        cases.append(Case(prompt, params))
    return cases


def make_growing_cases(tokenizer: Tokenizer, block_size: int, *, quick: bool) -> list[Case]:
    """Requests that begin with one block and end with three: in a pool of less than two each, some must give way."""
    ids = tokenizer.encode(TEXT * 8, add_special_tokens=False)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=block_size + 8,
        ignore_eos=True,
        logprobs=2,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    kinds = (params, params.replace(n=2, temperature=1.0, seed=5), params, params)
    count = 4 if quick else 8
    return [Case(ids[7 * number :][: block_size - 2], kinds[number % 4]) for number in range(count)]


def make_repeating_cases(tokenizer: Tokenizer) -> list[Case]:
    """Requests whose prompts repeat themselves, so that what comes next can be guessed: greedy, penalised and drawn."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.5, "seed": 3, "n": 2},
        {"temperature": 0.0, "repetition_penalty": 1.05, "frequency_penalty": 0.1},
    ]
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    kind = RequestOutputKind.FINAL_ONLY
    return [
        Case(
            ids[number : number + 12 + 5 * number] * 4, SamplingParams(**common, **kinds[number % 3], output_kind=kind)
        )
        for number in range(6)
    ]
