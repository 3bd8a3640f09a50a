"""UniprocExecutor and Worker on a tiny checkpoint on disk, through the real loader and the reference backend."""

from __future__ import annotations

import threading

import pytest

from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.exceptions import ModelError
from octavo.executor.factory import make_executor
from octavo.executor.uniproc import UniprocExecutor
from octavo.messages import CachedRequestData, KVSpec, SamplingParams, SchedulerOutput
from octavo.platforms.cpu import CpuPlatform
from octavo.worker.worker import Worker
from tests.worker.tiny_model import BLOCK, MAX_LEN, Driver, make_runner, new_request, save_checkpoint


def config_for(path: object, **model: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", **model),  # type: ignore[arg-type]
        cache=CacheConfig(block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        backend=BackendConfig(backend="reference"),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> object:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def executor(checkpoint):
    executor = make_executor(config_for(checkpoint))
    yield executor
    executor.shutdown()


def test_life_of_an_executor(executor):
    executor.load_model()
    plan = executor.plan_memory()
    assert plan.kv.groups == (KVSpec(kind="full", bytes_per_token=2 * 2 * 2 * 8 * 4),)
    # Four sequences of 64 tokens are all that can ever run: no more is asked for.
    assert plan.num_blocks == 4 * MAX_LEN // BLOCK + 1
    executor.initialize_kv_cache(plan)
    facts = executor.describe()
    assert "reference" in facts["kernels"]
    assert facts["weights"]
    prompt, params = [5, 6, 7, 8], SamplingParams(temperature=0.8, seed=1)
    plans = [
        SchedulerOutput(
            step_id=0,
            num_scheduled_tokens={"r": 4},
            new_requests=[new_request("r", prompt, params, block_ids=[1, 2])],
        )
    ]
    plans += [
        SchedulerOutput(
            step_id=step,
            num_scheduled_tokens={"r": 1},
            cached_requests=[CachedRequestData(request_id="r", num_computed_tokens=3 + step)],
        )
        for step in range(1, 6)
    ]
    # All six plans are in flight before the first result is read; they name no sampled token.
    futures = [executor.execute_model(plan) for plan in plans]
    results = [future.result(timeout=60) for future in futures]
    assert [result.step_id for result in results] == list(range(6))
    driver = Driver(make_runner())
    driver.step({"r": 4}, [new_request("r", prompt, params, block_ids=[1, 2])])
    for _ in range(5):
        driver.step({"r": 1})
    assert [result.sampled_token_ids["r"][0] for result in results] == driver.tokens("r")


def test_a_step_that_fails_ends_its_future_and_not_the_thread(executor):
    executor.load_model()
    executor.initialize_kv_cache(executor.plan_memory())
    too_many = SchedulerOutput(
        step_id=0,
        num_scheduled_tokens={f"r{i}": 33 for i in range(2)},
        new_requests=[
            new_request(f"r{i}", [1] * 33, SamplingParams(), block_ids=[1 + 3 * i, 2 + 3 * i, 3 + 3 * i])
            for i in range(2)
        ],
    )
    with pytest.raises(Exception, match="66 tokens"):
        executor.execute_model(too_many).result(timeout=60)
    new = [new_request(f"n{i}", [1, 2], SamplingParams(temperature=0.0), block_ids=[1 + i]) for i in range(4)]
    after = SchedulerOutput(
        step_id=1,
        num_scheduled_tokens={n.request_id: 2 for n in new},
        new_requests=new,
        finished_request_ids=["r0", "r1"],
    )
    result = executor.execute_model(after).result(timeout=60)
    assert result.errors == {}
    assert len(result.sampled_token_ids) == 4


def test_shutdown_finishes_what_was_submitted_and_is_idempotent(checkpoint):
    before = set(threading.enumerate())
    executor = UniprocExecutor(config_for(checkpoint), CpuPlatform())
    executor.load_model()
    executor.initialize_kv_cache(executor.plan_memory())
    future = executor.execute_model(SchedulerOutput(step_id=3, num_scheduled_tokens={}))
    executor.shutdown()
    executor.shutdown()
    assert future.result(timeout=0).step_id == 3
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="shut down"):
        executor.execute_model(SchedulerOutput(step_id=4, num_scheduled_tokens={}))


def test_errors_reach_the_caller(checkpoint, tmp_path):
    missing = make_executor(config_for(tmp_path / "nothing"))
    with pytest.raises(ModelError):
        missing.load_model()
    missing.shutdown()
    worker = Worker(config_for(checkpoint), CpuPlatform())
    with pytest.raises(RuntimeError, match="load_model"):
        worker.plan_memory()
    with pytest.raises(RuntimeError, match="initialize_kv_cache"):
        worker.execute_model(SchedulerOutput(step_id=0, num_scheduled_tokens={}))
    worker.load_model()
    plan = worker.plan_memory()
    worker.initialize_kv_cache(plan)
    with pytest.raises(RuntimeError, match="only once"):
        worker.initialize_kv_cache(plan)


def test_max_model_len_bounds_requests(checkpoint):
    worker = Worker(config_for(checkpoint, max_model_len=20), CpuPlatform())
    worker.load_model()
    memory = worker.plan_memory()
    assert memory.num_blocks == 4 * 2 + 1
    worker.initialize_kv_cache(memory)
    plan = SchedulerOutput(
        step_id=0,
        num_scheduled_tokens={"r": 21},
        new_requests=[new_request("r", [1] * 21, SamplingParams(), block_ids=[1, 2])],
    )
    assert "[1, 20]" in worker.execute_model(plan).errors["r"].message
