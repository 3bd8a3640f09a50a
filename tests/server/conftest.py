"""One server on the default model for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running_server import RunningServer, running_server

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def shared_server(smollm2_path: str) -> Iterator[RunningServer]:
    flags = f"--served-model-name smollm2 --max-model-len {MAX_MODEL_LEN} --kv-cache-memory 256MiB".split()
    with running_server(smollm2_path, *flags) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; whatever a test does to it, afterwards it is healthy, idle and still answers."""
    yield shared_server
    shared_server.wait_until_idle()
    answer = shared_server.client().completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=2, temperature=0
    )
    assert "Paris" in answer.choices[0].text
