"""BeamSearchParams: what ``LLM.beam_search`` takes, in vLLM's names. Knows nothing of requests."""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.messages.sampling_params import BeamSearch, SamplingParams


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """A beam search and how much of it is wanted. See ``BeamSearch`` for scores and ends.

    ``temperature`` and other options of drawing would be idle, since nothing is drawn. Construction raises
    ValidationError naming the field.
    """

    beam_width: int
    max_tokens: int | None = 16  # None: up to the context's end
    n: int | None = None  # how many of the best to return (default: beam_width)
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    logprobs: int = 0  # besides each token's own, those of the best ones
    temperature: float = 0.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same as a request's SamplingParams."""
        beams = BeamSearch(
            beam_width=self.beam_width, length_penalty=self.length_penalty, early_stopping=self.early_stopping
        )
        return SamplingParams(
            n=self.beam_width if self.n is None else self.n,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            beam_search=beams,
        )
