"""The incremental detokeniser against the full decode and against a plain re-statement of the stop rules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.messages import SamplingParams
from octavo.tokenizer import Tokenizer, load_tokenizer
from tests.formats.gguf_writer import write_gguf
from tests.tokenizer.samples import (
    gguf_metadata,
    nasty_strings,
    sentencepiece_metadata,
    train_byte_level,
    train_sentencepiece,
)

BYTE_LEVEL = train_byte_level("smollm", 600)


def load(kind: str, folder: Path) -> Tokenizer:
    if kind == "byte_level":
        return load_tokenizer(write_gguf(folder / "m.gguf", gguf_metadata(BYTE_LEVEL, "smollm")))
    prefix = kind == "sentencepiece"
    metadata = sentencepiece_metadata(train_sentencepiece(add_prefix=prefix), add_prefix=prefix)
    return load_tokenizer(write_gguf(folder / "m.gguf", metadata))


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    kinds = ("byte_level", "sentencepiece", "sentencepiece without prefix")
    return {kind: load(kind, tmp_path_factory.mktemp("t")) for kind in kinds}


@pytest.fixture(scope="module")
def byte_level(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["byte_level"]


def stream(
    tokenizer: Tokenizer, steps: Iterable[list[int]], prompt: list[int] | None = None, **params: object
) -> tuple[list[str], str | None]:
    """The deltas, a step each and one at the end, and the stop string."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params), prompt or [])  # type: ignore[arg-type]
    deltas, stop = [], None
    for step in steps:
        update = detokenizer.update(step, False)
        deltas.append(update.delta)
        stop = stop or update.stop_string
    deltas.append(detokenizer.update([], True).delta)
    stop = stop or detokenizer.stop_string
    assert detokenizer.text == "".join(deltas)
    return deltas, stop


def one_by_one(ids: Iterable[int]) -> list[list[int]]:
    return [[i] for i in ids]


def by_character(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of single bytes, so that characters are split over tokens."""
    table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [table[bytes([byte])] for byte in text.encode()]


KINDS = ["byte_level", "sentencepiece", "sentencepiece without prefix"]


@settings(max_examples=200, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_joined_equal_the_full_decode(
    all_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Whatever the ids (bytes of no character, special tokens, beyond the vocabulary) and however they are cut."""
    tokenizer = all_tokenizers[kind]
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    token = st.one_of(st.integers(0, tokenizer.vocab_size + 3), st.sampled_from(single), st.integers(0, 5))
    steps = data.draw(st.lists(st.lists(token, max_size=4), max_size=12))
    skip = data.draw(st.booleans())
    deltas, _ = stream(tokenizer, steps, skip_special_tokens=skip)
    ids = [i for step in steps for i in step]
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    if kind == "byte_level":
        known = [i for i in ids if i < tokenizer.vocab_size]
        assert "".join(deltas) == BYTE_LEVEL_MARKED.decode(known, skip_special_tokens=skip)


BYTE_LEVEL_MARKED = tokenizers.Tokenizer.from_str(BYTE_LEVEL.to_str())


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_in_whole_characters(all_tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = all_tokenizers[kind]
    for text in nasty_strings():
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas, _ = stream(tokenizer, one_by_one(ids), skip_special_tokens=False)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_characters_split_over_tokens(all_tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """A06: each character is shown once its last byte is there, also while a stop string is waited for."""
    tokenizer = all_tokenizers[kind]
    text = "你好👨‍👩‍👧é\ufffdZZ"
    deltas, _ = stream(tokenizer, one_by_one(by_character(tokenizer, text)), stop=["ZZZ"])
    shown = [delta for delta in deltas if delta]
    assert shown == [*text[:-2], "ZZ"]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_an_unfinished_character_is_marked_at_the_end_alone(all_tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = all_tokenizers[kind]
    ids = by_character(tokenizer, "好😀")[:-1]
    deltas, _ = stream(tokenizer, one_by_one(ids))
    assert [delta for delta in deltas if delta] == ["好", "\ufffd"]
    assert tokenizer.decode(ids) == "好\ufffd"


def test_a_continued_prompt_keeps_its_space(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["sentencepiece"]
    prompt, ids = tokenizer.encode("Hello,"), tokenizer.encode("world", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[0]).startswith(b" ")
    assert "".join(stream(tokenizer, [ids], prompt)[0]) == " world"
    assert "".join(stream(tokenizer, [ids], prompt[:1])[0]) == "world"  # BOS alone shows no text


# ---- stop strings


@pytest.mark.parametrize(
    ("text", "stops", "shown", "found"),
    [
        (" Alice! hi", ["\n", "Alice:"], " Alice! hi", None),
        (" Alice: hi", ["\n", "Alice:"], " ", "Alice:"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("aaab", ["aab"], "a", "aab"),
        ("xabcy", ["abc", "ab"], "x", "ab"),  # completed first
        ("xabcy", ["c", "abc"], "x", "abc"),  # completed together: the longest
        ("xabcdy", ["abcd", "c"], "xab", "c"),
        ("stop here", ["stop"], "", "stop"),
        ("ends with sto", ["stop"], "ends with sto", None),
        ("日本語。終", ["。"], "日本語", "。"),
        ("日本語", ["本x", "語x"], "日本語", None),
        ("nothing", ["zzz"], "nothing", None),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(
    byte_level: Tokenizer, text: str, stops: list[str], shown: str, found: str | None, include: bool
) -> None:
    """A07, for each way of cutting: byte by byte, as encoded, and all in one step."""
    encoded = byte_level.encode(text, add_special_tokens=False)
    expected = shown + (found or "") if include else shown
    for steps in (one_by_one(by_character(byte_level, text)), one_by_one(encoded), [encoded]):
        deltas, stop = stream(byte_level, steps, stop=stops, include_stop_str_in_output=include)
        assert ("".join(deltas), stop) == (expected, found)


def test_only_a_true_beginning_is_held_back(byte_level: Tokenizer) -> None:
    deltas, _ = stream(byte_level, one_by_one(by_character(byte_level, "a###b##c#")), stop=["####"])
    assert deltas == ["a", "", "", "", "###b", "", "", "##c", "", "#"]


def test_including_the_stop_string_holds_nothing_back(byte_level: Tokenizer) -> None:
    ids = by_character(byte_level, "a##b")
    deltas, stop = stream(byte_level, one_by_one(ids), stop=["##"], include_stop_str_in_output=True)
    assert (deltas, stop) == (["a", "#", "#", "", ""], "##")


def test_nothing_after_the_stop(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, SamplingParams(stop=["."]), [])
    update = detokenizer.update(byte_level.encode("one. two."), False)
    assert (update.delta, update.stop_string) == ("one", ".")
    again = detokenizer.update(byte_level.encode("three."), True)
    assert (again.delta, again.stop_string, detokenizer.text, detokenizer.stop_string) == ("", None, "one", ".")


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, "a"), (2, "a"), (3, "a.b"), (4, "a.b"), (5, "a.b.c"), (7, "a.b.c.d")]
)
def test_min_tokens(byte_level: Tokenizer, min_tokens: int, shown: str) -> None:
    """A01: a stop string completed by fewer tokens stays in the text and is not matched later."""
    ids = by_character(byte_level, "a.b.c.d")
    for steps in (one_by_one(ids), [ids]):
        deltas, stop = stream(byte_level, steps, stop=["."], min_tokens=min_tokens)
        assert ("".join(deltas), stop) == (shown, None if shown == "a.b.c.d" else ".")


def test_a_stop_begun_before_min_tokens_counts_when_completed(byte_level: Tokenizer) -> None:
    ids = by_character(byte_level, "xabcy")
    assert "".join(stream(byte_level, one_by_one(ids), stop=["abc"], min_tokens=4)[0]) == "x"
    assert "".join(stream(byte_level, one_by_one(ids), stop=["abc"], min_tokens=5)[0]) == "xabcy"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_token_as_stop_string(byte_level: Tokenizer, skip: bool, include: bool) -> None:
    """A07: it stops although it is not shown."""
    end = byte_level.encode("<|im_end|>")
    assert end[0] in byte_level.special_token_ids
    ids = [*byte_level.encode("hi"), *end, *byte_level.encode("there")]
    params = {"stop": ["<|im_end|>"], "skip_special_tokens": skip, "include_stop_str_in_output": include}
    deltas, stop = stream(byte_level, one_by_one(ids), **params)
    assert ("".join(deltas), stop) == ("hi<|im_end|>" if include else "hi", "<|im_end|>")
    deltas, stop = stream(byte_level, one_by_one(ids), **params, min_tokens=9, max_tokens=20)
    assert ("".join(deltas), stop) == ("hithere" if skip else "hi<|im_end|>there", None)


def test_detokenize_false(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [byte_level.encode("text")], detokenize=False) == (["", ""], None)


def first_stop(text: str, stops: list[str], counts: list[int], min_tokens: int) -> tuple[int, str] | None:
    """The rule in the plainest words: where the first stop string ends, and which; ``counts``: tokens per character."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here and counts[end - 1] >= min_tokens:
            return end, max(here, key=len)
    return None


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab好", max_size=4), max_size=12),
    st.lists(st.text("ab好", min_size=1, max_size=4), max_size=3),
    st.integers(0, 8),
    st.booleans(),
    st.integers(1, 5),
)
def test_stops_against_the_plain_rule(
    words: list[str], stops: list[str], min_tokens: int, include: bool, step: int
) -> None:
    """Random texts over three letters, where overlaps are frequent; a word is a token."""
    tokenizer = _Words(words)
    text = "".join(words)
    counts = [i + 1 for i, word in enumerate(words) for _ in word]
    ids = list(range(len(words)))
    steps = [ids[i : i + step] for i in range(0, len(ids), step)]
    params = {"stop": stops, "min_tokens": min_tokens, "max_tokens": 100, "include_stop_str_in_output": include}
    deltas, stop = stream(tokenizer, steps, **params)  # type: ignore[arg-type]
    found = first_stop(text, stops, counts, min_tokens)
    if found is None:
        assert ("".join(deltas), stop) == (text, None)
    else:
        end, which = found
        assert ("".join(deltas), stop) == (text[: end if include else end - len(which)], which)
    if not stops:
        assert deltas[:-1] == ["".join(words[i] for i in s) for s in steps]


class _Words:
    """As much of a tokenizer as the detokeniser reads: token i is the i-th word."""

    special_token_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def __init__(self, words: list[str]):
        self._words = words

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id].encode()
