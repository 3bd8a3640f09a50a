"""The loop with the real scheduler and worker: isolation of failures, aborts, depth of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from octavo.config import EngineConfig
from octavo.engine.core import MAX_FAILED_STEPS, EngineCore
from octavo.engine.core_builder import build_core
from octavo.exceptions import ConfigError, EngineDeadError
from octavo.executor.factory import make_executor
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RequestFacts,
    SamplingParams,
    SchedulerOutput,
    SchedulerStats,
    SchedulingOptions,
)

from .tiny_llama import MAX_POSITION, VOCAB, make_config


class FlakyExecutor:
    """The real executor; the steps whose numbers (from 0) are in ``broken`` raise instead of running."""

    def __init__(self, config: EngineConfig, broken: set[int]) -> None:
        self._real = make_executor(config)
        self._broken = broken
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        number, self._count = self._count, self._count + 1
        if number in self._broken:
            raise MemoryError(f"step {number}")
        return self._real.execute_model(plan)


def make_core(
    model: str,
    *,
    broken: set[int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_scheduled: Callable[[SchedulerStats], None] = lambda stats: None,
    **changes: Any,
) -> EngineCore:
    config = make_config(model, **changes)
    return build_core(config, lambda c: FlakyExecutor(c, broken or set()), on_scheduled=on_scheduled, clock=clock)


def request(name: str, prompt: list[int], max_tokens: int = 6, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | params))
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=sampling, arrival_time=0.0)


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    """Step until idle; outputs by request."""
    found: dict[str, list[EngineCoreOutput]] = {}
    while core.has_work():
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    core.check_invariants()
    return found


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_info_and_limits(tiny_model: str) -> None:
    core = make_core(tiny_model)
    assert (core.info.max_model_len, core.info.vocab_size) == (MAX_POSITION, VOCAB)
    assert core.info.num_blocks == 2048 // 16 + 1
    assert [name for name, _ in core.info.phases] == ["read model header", "build program", "load weights"]
    core.shutdown()
    core.shutdown()


def test_model_length_shrinks_to_the_pool(tiny_model: str, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(tiny_model, kv_tokens=96)
    assert core.info.max_model_len == 96
    assert "96 instead of 512" in caplog.text
    core.add_request(request("a", [1] * 95, max_tokens=400))
    assert run(core)["a"][-1].finish_reason == FinishReason.LENGTH
    core.shutdown()


def test_unusable_sizes_are_config_errors(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        make_core(tiny_model, kv_cache_memory=100)
    with pytest.raises(ConfigError, match=f"{MAX_POSITION} positions"):
        make_core(tiny_model, max_model_len=MAX_POSITION + 1)


def test_a_change_of_the_batch_is_told_before_the_step_ends(tiny_model: str) -> None:
    told: list[tuple[int, int]] = []
    core = make_core(tiny_model, on_scheduled=lambda s: told.append((s.num_running, s.num_waiting)), max_num_seqs=2)
    for name in "abc":
        core.add_request(request(name, [5], max_tokens=3))
    core.step()
    assert told == [(2, 1)]
    core.step()
    assert told == [(2, 1)]  # only changes are told
    run(core)
    assert told[:2] == [(2, 1), (1, 0)]
    core.shutdown()


@pytest.mark.parametrize("depth", [2, 3])
def test_depth_changes_no_token(tiny_model: str, depth: int) -> None:
    def answers(depth: int) -> dict[str, list[int]]:
        core = make_core(tiny_model, pipeline_depth=depth, kv_tokens=256)  # tight: preemptions happen
        for i in range(8):
            core.add_request(request(f"r{i}", [i + 2] * (20 + i), max_tokens=30 + i, temperature=0.8, seed=i))
        found = {name: tokens(outputs) for name, outputs in run(core).items()}
        core.shutdown()
        return found

    expected = answers(1)
    assert {name: len(ids) for name, ids in expected.items()} == {f"r{i}": 30 + i for i in range(8)}
    assert answers(depth) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_fails_its_requests_and_no_others(tiny_model: str, depth: int) -> None:
    core = make_core(tiny_model, pipeline_depth=depth, broken={3})
    expected = make_core(tiny_model)
    core.add_request(request("a", [5, 6, 7], max_tokens=20))
    found = run(core)
    assert found["a"][-1].finish_reason == FinishReason.ERROR
    fault = found["a"][-1].error
    assert fault is not None
    assert "MemoryError: step 3" in fault.cause
    assert "MemoryError" not in fault.message
    for one in (core, expected):
        one.add_request(request("b", [5, 6, 7], max_tokens=20))
    assert tokens(run(core)["b"]) == tokens(run(expected)["b"])
    core.shutdown()
    expected.shutdown()


def test_repeated_failures_end_the_engine(tiny_model: str) -> None:
    core = make_core(tiny_model, broken=set(range(100)))
    for i in range(MAX_FAILED_STEPS - 1):
        core.add_request(request(f"r{i}", [1, 2]))
        outputs = core.step().outputs
        assert [o.finish_reason for o in outputs] == [FinishReason.ERROR]
    core.add_request(request("last", [1, 2]))
    with pytest.raises(EngineDeadError, match="in a row"):
        core.step()
    core.shutdown()


def test_a_request_that_can_never_run_is_refused_alone(tiny_model: str) -> None:
    core = make_core(tiny_model, kv_tokens=96)
    core.add_request(request("big", [1] * 200))
    core.add_request(request("small", [1, 2, 3]))
    found = run(core)
    assert found["big"][0].finish_reason == FinishReason.ERROR
    assert len(tokens(found["small"])) == 6
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_frees_the_blocks_within_a_step(tiny_model: str, depth: int) -> None:
    core = make_core(tiny_model, pipeline_depth=depth, enable_prefix_caching=False)
    for name in ("a", "b"):
        core.add_request(request(name, [1] * 100, max_tokens=300))
    core.add_request(request("waiting", [1] * 100))
    for _ in range(4):
        used = core.step().stats
    assert used is not None
    assert used.kv_cache_usage > 0
    core.abort(["a", "waiting", "nobody"])
    step = core.step()
    assert {o.request_id for o in step.outputs if o.finish_reason == FinishReason.ABORT} == {"a", "waiting"}
    assert step.stats is not None
    assert (step.stats.num_running, step.stats.num_waiting) == (1, 0)
    assert step.stats.kv_cache_usage < used.kv_cache_usage
    core.abort(["b"])
    last = core.step()
    assert last.stats is not None
    assert (last.stats.num_running, last.stats.kv_cache_usage) == (0, 0.0)
    assert not run(core)
    core.shutdown()


def test_tokens_of_an_aborted_request_are_dropped(tiny_model: str) -> None:
    core = make_core(tiny_model, pipeline_depth=2)
    core.add_request(request("a", [1, 2, 3], max_tokens=50))
    core.step()
    core.abort(["a"])
    outputs = run(core)["a"]
    assert [o.finish_reason for o in outputs] == [FinishReason.ABORT]
    core.shutdown()


def test_a_core_lives_in_the_time_of_the_clock_it_is_given(tiny_model: str) -> None:
    now = [1000.0]
    core = make_core(tiny_model, clock=lambda: now[0], pipeline_depth=1)
    assert [seconds for _, seconds in core.info.phases] == [0.0, 0.0, 0.0], "no time passed in it"
    execute = core._executor.execute_model

    def slowly(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        now[0] += 5.0
        return execute(plan)

    core._executor.execute_model = slowly
    core.add_request(request("a", [3, 1, 4], max_tokens=2))
    now[0] += 2.0
    first = core.step()
    assert first.outputs[0].facts == RequestFacts(queued_time=1000.0, scheduled_time=1002.0)
    assert first.stats is not None
    assert (first.timestamp, first.stats.step_seconds) == (1007.0, 5.0)
    late = msgspec.structs.replace(request("late", [1, 5]), scheduling=SchedulingOptions(timeout=1007.0))
    core.add_request(late)
    assert {output.request_id: output.finish_reason for output in core.step().outputs} == {
        "a": FinishReason.LENGTH,
        "late": FinishReason.ABORT,
    }
    core.shutdown()
