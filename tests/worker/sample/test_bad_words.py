"""bad_words against a plain search of the output, over random outputs and words."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import NewRequestData, OutputOptions, SamplingParams
from octavo.worker.sample.processors import make_bad_words

VOCAB = 6
tokens = st.integers(0, VOCAB - 1)


def request(words: list[list[int]]) -> NewRequestData:
    return NewRequestData(
        request_id="r",
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[1],
        sampling_params=SamplingParams(),
        output=OutputOptions(bad_words_token_ids=words),
    )


@given(
    st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(tokens, min_size=1, max_size=5),
    st.lists(tokens, max_size=12),
)
def test_exactly_what_would_complete_a_word_is_excluded(
    words: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    processor = make_bad_words(request(words))
    assert processor is not None
    row = np.zeros(VOCAB, np.float32)
    processor.apply(row, np.array(prompt + output, np.int32), len(prompt))
    for token in range(VOCAB):
        after = [*output, token]
        completed = any(after[-len(word) :] == word for word in words)
        assert (row[token] == -np.inf) == completed


def test_no_words_need_no_processor() -> None:
    assert make_bad_words(request([])) is None
