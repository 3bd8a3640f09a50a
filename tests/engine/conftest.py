"""The tiny model, and engines that run it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

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


@pytest.fixture
def engines(tiny_model: str) -> Iterator[Any]:
    """Makes engines; of so many blocks, if told."""
    made: list[LLMEngine] = []

    def make(num_blocks: int | None = None, **changes: Any) -> LLMEngine:
        config = make_config(tiny_model, **changes)
        if num_blocks is not None:  # whatever a block takes
            whole = LLMEngine(config)
            size = whole.info.kv_cache_bytes // whole.info.num_blocks
            whole.shutdown()
            config = make_config(tiny_model, **changes, kv_cache_memory=(num_blocks + 1) * size)
        made.append(LLMEngine(config))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()
