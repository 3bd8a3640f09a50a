"""The tiny random model, and an engine that runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.engine.llm_engine import LLMEngine
from octavo.structured_output.checker import GrammarChecker
from octavo.tokenizer import load_tokenizer
from tests.engine.tiny_llama import VOCAB, make_config, write_model, write_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the model."""
    folder = tmp_path_factory.mktemp("tiny-constrained")
    write_tokenizer(folder)
    write_model(folder)
    return str(folder)


@pytest.fixture(scope="session")
def engine(tiny_model: str) -> Iterator[LLMEngine]:
    """With the native kernels, whose sampler obeys the masks."""
    engine = LLMEngine(make_config(tiny_model, backend="cpu", threads=1, weights_cache=False))
    yield engine
    engine.check_invariants()
    engine.shutdown()


@pytest.fixture
def checker(tiny_model: str) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(make_config(tiny_model).structured_outputs, load_tokenizer(tiny_model), VOCAB)
    yield checker
    checker.close()
