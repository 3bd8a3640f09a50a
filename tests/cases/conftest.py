"""What the cases share: one server and one LLM on the default model, proved healthy, idle and whole after every test.

``live_server`` is a real ``octavo serve`` in a process of its own with a small KV pool; ``llm`` is the same model in
this process. Both live for the whole session, so a case costs only its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM
from tests import patient
from tests.server.running_server import RunningServer, running_server

MAX_MODEL_LEN = 1024
POOL = "64MiB"  # about 180 blocks, so that a few long requests fill it


@pytest.fixture(scope="session")
def case_server(smollm2_path: str) -> Iterator[RunningServer]:
    """The server of all cases. Take ``live_server`` instead, which looks after it."""
    flags = f"--served-model-name smollm2 --max-model-len {MAX_MODEL_LEN} --kv-cache-memory {POOL}".split()
    with running_server(smollm2_path, *flags) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def live_server(case_server: RunningServer) -> Iterator[RunningServer]:
    """The server; whatever a test does to it, afterwards ``assert_whole`` holds."""
    yield case_server
    assert_whole(case_server)


def assert_whole(server: RunningServer) -> None:
    """Healthy, nothing running or waiting, every block free, and a plain request still gets its usual answer."""
    server.wait_until_idle()
    assert patient.get(f"{server.url}/health").status_code == 200
    fields = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    answer = patient.post(f"{server.url}/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]


@pytest.fixture(scope="session")
def case_llm(smollm2_path: str) -> Iterator[LLM]:
    """The LLM of all cases. Take ``llm`` instead, which looks after it."""
    with LLM(smollm2_path, max_model_len=MAX_MODEL_LEN, kv_cache_memory=POOL, max_num_seqs=16, threads=1) as one:
        yield one


@pytest.fixture
def llm(case_llm: LLM) -> Iterator[LLM]:
    """The LLM; after the test nothing runs in it and no block is lost or shared wrongly."""
    yield case_llm
    engine = case_llm._live_engine()
    assert not engine.has_unfinished()
    engine.drain()
    engine.check_invariants()
