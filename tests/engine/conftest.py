"""The tiny model, and engines that run it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.llm_engine import LLMEngine

from .tiny_llama import make_config, write_model, write_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the model."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tokenizer(folder)
    write_model(folder)
    return str(folder)


@pytest.fixture
def tiny_engine(tiny_model: str) -> Iterator[LLMEngine]:
    engine = LLMEngine(make_config(tiny_model))
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture
async def tiny_async(tiny_model: str) -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.create(make_config(tiny_model))
    yield engine
    await engine.shutdown()
