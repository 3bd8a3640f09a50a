"""The worker's grammars: compiled once, each matcher alone, and a vocabulary of real bytes."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from random import Random

import numpy as np
import pytest

from octavo.exceptions import RequestError, ValidationError
from octavo.structured_output.bank import MAX_GRAMMARS, GrammarBank, MaskBudget
from octavo.structured_output.cache import LruCache
from octavo.structured_output.translate import OPTIONS
from octavo.tokenizer import load_tokenizer
from tests.engine.tiny_llama import VOCAB
from tests.formats.gguf_writer import write_gguf
from tests.tokenizer.samples import sentencepiece_metadata, train_sentencepiece


def text(rule: str) -> str:
    return f"start: {rule}{OPTIONS}"


@pytest.fixture
def bank(tiny_model: str):
    bank = GrammarBank(lambda: load_tokenizer(tiny_model), VOCAB + 40)  # logits wider than the tokenizer
    yield bank
    bank.close()


def allowed(bank: GrammarBank, rule: str, taken: list[int] | None = None) -> tuple[set[int], bool]:
    matcher = bank.matcher(text(rule), taken or [], MaskBudget())
    mask = np.zeros(bank.mask_words, np.uint32)
    is_over = matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()), is_over


def test_a_mask_is_what_the_bytes_of_the_tokens_say(bank: GrammarBank, tiny_model: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    wanted = b"the quick"
    ids, is_over = allowed(bank, '"the quick"')
    spelt = {
        i
        for i in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(i) and wanted.startswith(tokenizer.token_bytes(i))
    }
    assert ids == spelt - tokenizer.special_token_ids
    assert not is_over
    assert bank.mask_words == -(-(VOCAB + 40) // 32)


def test_bytes_within_a_character_are_tokens_of_their_own(bank: GrammarBank, tiny_model: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    ids, _ = allowed(bank, '"🙂"')
    assert {tokenizer.token_bytes(i) for i in ids} >= {"🙂".encode()[:1]}


def test_the_end_is_eos_alone(bank: GrammarBank, tiny_model: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert allowed(bank, '"a"', [a]) == (set(tokenizer.eos_token_ids), True)
    ids, is_over = allowed(bank, "/a+/", [a])
    assert set(tokenizer.eos_token_ids) < ids
    assert not is_over
    assert allowed(bank, '"a"', [a, tokenizer.eos_token_ids[0]])[1]


def test_tokens_that_do_not_fit_are_refused(bank: GrammarBank, tiny_model: str) -> None:
    (b,) = load_tokenizer(tiny_model).encode("b", add_special_tokens=False)
    with pytest.raises(RequestError, match="the grammar of structured_outputs"):
        bank.matcher(text('"a"'), [b], MaskBudget())


def test_a_grammar_that_does_not_compile_is_the_requests_error(bank: GrammarBank) -> None:
    assert bank.prepare("start: nope").exception() is not None
    with pytest.raises(RequestError, match="does not compile: line 1"):
        bank.matcher("start: nope", [], MaskBudget())


def test_a_vocabulary_that_cannot_be_read_fails_requests_only() -> None:
    def missing() -> None:
        raise OSError("gone")

    bank = GrammarBank(missing, VOCAB)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="gone"):
        bank.matcher(text('"a"'), [], MaskBudget())
    bank.close()


def test_grammars_are_compiled_once_and_forgotten_at_last(bank: GrammarBank) -> None:
    first = bank.prepare(text('"a"'))
    assert bank.prepare(text('"a"')) is first
    first.result()
    for i in range(MAX_GRAMMARS):
        bank.prepare(text(f'"{i}"')).result()
    assert bank.prepare(text('"a"')) is not first


def test_many_threads_may_ask(bank: GrammarBank) -> None:
    found: list[set[int]] = []
    threads = [threading.Thread(target=lambda: found.append(allowed(bank, "/[a-z]+/")[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(ids == found[0] for ids in found)


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    cache: LruCache[str, str] = LruCache(3, 10, lambda key, value: len(value))
    for key in "abc":
        cache.put(key, key)
    assert cache.get("a") == "a"
    cache.put("d", "d")
    assert [cache.get(key) for key in "abcd"] == ["a", None, "c", "d"]
    cache.put("e", "12345678")
    assert [cache.get(key) for key in "acde"] == [None, "c", "d", "12345678"]
    cache.put("f", "x" * 99)  # alone it may be larger
    assert len(cache) == 1
    cache.put("f", "")
    cache.put("g", "1234567890")
    assert len(cache) == 2


def test_a_grammar_that_is_slow_to_follow_ends_its_request(bank: GrammarBank, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("octavo.structured_output.bank.time.thread_time", lambda: next(clock) * 0.2)  # a mask: 0.2 s
    budget = MaskBudget()
    first, second = (bank.matcher(text("/a*/"), [], budget) for _ in range(2))
    other, mask = bank.matcher(text("/a*/"), [], MaskBudget()), np.zeros(bank.mask_words, np.uint32)
    first.fill(mask)
    second.fill(mask)
    for sample in (first, second):  # of one request
        with pytest.raises(ValidationError, match="too much work for every token"):
            sample.fill(mask)
    other.fill(mask)


@pytest.mark.parametrize("add_prefix", [False, True])
def test_sentencepiece_tokens_are_their_bytes_too(tmp_path: Path, add_prefix: bool) -> None:
    """Pieces with visible spaces, and single bytes for what no piece spells; random walks through regexes show them."""
    pieces = sentencepiece_metadata(train_sentencepiece(add_prefix=add_prefix), add_prefix=add_prefix)
    write_gguf(tmp_path / "t.gguf", pieces)
    tokenizer = load_tokenizer(tmp_path / "t.gguf")
    bank, random = GrammarBank(lambda: tokenizer, tokenizer.vocab_size), Random(1)
    try:
        for regex in (
            "[a-z]{2,8} [0-9]{4}",
            " x{3}",
            "n\u00e9\U0001f642{1,3}",
            "<s>|<tool_call>",
            "[\u4e00-\u9fff]{3}",
        ):
            for _ in range(5):
                matcher, ids = bank.matcher(text(f"/{regex}/"), [], MaskBudget()), []
                mask = np.zeros(bank.mask_words, np.uint32)
                while not matcher.fill(mask):
                    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
                    ids.append(random.choice([i for i in allowed if i not in tokenizer.eos_token_ids]))
                    matcher.take(ids[-1:])
                spelt = b"".join(map(tokenizer.token_bytes, ids)).decode()
                assert re.fullmatch(regex, spelt), spelt
                assert not tokenizer.special_token_ids & set(ids)
    finally:
        bank.close()
