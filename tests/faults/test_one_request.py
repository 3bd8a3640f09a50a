"""A fault of one request, at any stage in the core or before the worker, ends that request alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.config import EngineConfig, SchedulerConfig
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.request import Request
from octavo.engine.core import EngineCore
from octavo.engine.core_builder import build_core
from octavo.engine.output_collector import OutputCollector
from octavo.exceptions import InvariantError, RequestError, ValidationError
from octavo.executor.factory import make_executor
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RequestFault,
    RequestOutputKind,
    SchedulerOutput,
)
from octavo.messages.fault import MAX_CAUSE
from tests.core.checking_worker import Loop, cache_config, make_request
from tests.engine.tiny_llama import make_config

VICTIM = "r2"
SECRET = "/home/secret"  # stands for what a client must not see


class Trap:
    """Makes a method of Request raise from its ``nth`` call on, for the victim alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> None:
        original: Callable[..., Any] = getattr(Request, name)
        calls = 0

        def method(request: Request, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if request.request_id == VICTIM:
                calls += 1
                if calls >= nth:
                    raise ZeroDivisionError(SECRET)
            return original(request, *args, **kwargs)

        monkeypatch.setattr(Request, name, method)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("nth", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ["hashes", "advance", "append", "output"])
def test_planning_and_taking_in(name: str, nth: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that distrusts the scheduler sees sound plans, and everybody else gets the right tokens."""
    if name == "output":  # is also how a request says that it failed: only its second use can be a fault of taking in
        original = Request.output

        def output(request: Request, new: list[int], **kwargs: Any) -> EngineCoreOutput:
            if request.request_id == VICTIM and new and request.num_output_tokens >= nth:
                raise ZeroDivisionError(SECRET)
            return original(request, new, **kwargs)

        monkeypatch.setattr(Request, "output", output)
    else:
        Trap(monkeypatch, name, nth)
    loop = Loop(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24), cache_config(4), num_blocks=20, depth=depth)
    for number in range(6):
        loop.add(make_request(f"r{number}", [1, 2, 3, 4, 5, 6, 7, 8, 9, number], max_tokens=12))
    loop.run()
    loop.check_results()
    reasons = {request_id: received.finish_reason for request_id, received in loop.received.items()}
    fault = loop.received[VICTIM].outputs[-1].error
    if reasons.pop(VICTIM) is FinishReason.ERROR:
        assert fault is not None
        assert SECRET not in fault.message
        assert f"ZeroDivisionError: {SECRET}" in fault.cause
        assert "test_one_request.py:" in fault.cause
    else:
        assert name == "hashes"  # not called that often
    assert set(reasons.values()) == {FinishReason.LENGTH}


def test_an_admission_rule_that_raises() -> None:
    class Picky:
        def admits(self, request: Request, running: Sequence[Request]) -> bool:
            return 1 // (request.request_id != VICTIM) == 1

    loop = Loop(SchedulerConfig(max_num_seqs=2), cache_config(4), num_blocks=20)
    loop.scheduler._rules.append(Picky())
    for number in range(5):
        loop.add(make_request(f"r{number}", [1, 2, 3, number]))
    loop.run()
    loop.check_results()
    assert [r for r, got in loop.received.items() if got.finish_reason is FinishReason.ERROR] == [VICTIM]


def test_wrong_books_are_nobodys_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """An InvariantError is not blamed on a request: the core must end, and its successor begins with a new pool."""
    loop = Loop(SchedulerConfig(), cache_config(4), num_blocks=20)
    loop.add(make_request("a", [1, 2, 3]))

    def lost(*_: Any, **__: Any) -> Any:
        raise InvariantError("a block is lost")

    monkeypatch.setattr(KVCacheManager, "admit", lost)
    with pytest.raises(InvariantError):
        loop.step()


# ---- the core around the scheduler


@pytest.fixture
def core(tiny_model: str) -> Any:
    config = make_config(tiny_model)
    one = build_core(config)
    yield one
    one.shutdown()


def tiny_request(name: str, prompt: list[int], **changes: Any) -> EngineCoreRequest:
    return make_request(name, prompt, temperature=0.0, **changes)


def run(core: EngineCore) -> dict[str, EngineCoreOutput]:
    last: dict[str, EngineCoreOutput] = {}
    while core.has_work():
        last |= {output.request_id: output for output in core.step().outputs}
    core.check_invariants()
    return last


def test_queueing(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Request.__init__

    def init(self: Request, source: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        if source.request_id == VICTIM:
            raise KeyError(SECRET)
        original(self, source, *args, **kwargs)

    monkeypatch.setattr(Request, "__init__", init)
    for name in ("r1", VICTIM, "r3"):
        core.add_request(tiny_request(name, [5, 6, 7]))
    last = run(core)
    assert {name: output.finish_reason for name, output in last.items()} == {
        "r1": FinishReason.LENGTH,
        VICTIM: FinishReason.ERROR,
        "r3": FinishReason.LENGTH,
    }


def test_when_all_that_was_to_run_has_failed(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is empty, but its failure is told, and the core is ready for the next request."""
    Trap(monkeypatch, "advance", 1)
    core.add_request(tiny_request(VICTIM, [5, 6, 7]))
    assert run(core)[VICTIM].finish_reason is FinishReason.ERROR
    core.add_request(tiny_request("r3", [5, 6, 7]))
    assert run(core)["r3"].finish_reason is FinishReason.LENGTH


class Raising:
    """The real executor; a step with the victim raises, at once or when it is awaited, before or after its work."""

    def __init__(self, config: EngineConfig, when: str) -> None:
        self._real, self._when = make_executor(config), when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if not any(request_id.startswith(VICTIM) for request_id in plan.num_scheduled_tokens):
            return self._real.execute_model(plan)
        if self._when == "before":
            raise MemoryError(SECRET)
        self._real.execute_model(plan).result()
        failed: Future[ModelRunnerOutput] = Future()
        failed.set_exception(MemoryError(SECRET))
        return failed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_step_that_raises_because_of_one_request(tiny_model: str, n: int, when: str, depth: int) -> None:
    """Whose fault it was is found out, and the others give the very tokens that they give alone."""
    config = make_config(tiny_model, pipeline_depth=depth)
    requests = [tiny_request(f"r{i}", [5, 6, 7, i] * 6, max_tokens=10, n=n) for i in range(6)]
    alone = {}
    real = build_core(config)
    for request in requests:
        real.add_request(request)
        alone |= tokens(real)
    real.shutdown()
    core = build_core(config, lambda c: Raising(c, when))
    for request in requests[:4]:
        core.add_request(request)
    core.step()
    for request in requests[4:]:
        core.add_request(request)
    found = tokens(core)
    victims = {name for name in found if name.startswith(VICTIM)}
    assert len(victims) == n
    for name in victims:
        assert found.pop(name) is None
        del alone[name]
    assert found == alone
    core.shutdown()


def tokens(core: EngineCore) -> dict[str, list[int] | None]:
    """Run to the end: the tokens of each sequence, None for those that failed."""
    found: dict[str, list[int] | None] = {}
    while core.has_work():
        for output in core.step().outputs:
            so_far = found.setdefault(output.request_id, [])
            if output.finish_reason is FinishReason.ERROR:
                assert output.error is not None
                assert SECRET not in output.error.message
                found[output.request_id] = None
            elif so_far is not None:
                so_far += output.new_token_ids
    core.check_invariants()
    return found


# ---- what is told


def test_a_fault_tells_the_client_little_and_the_log_all() -> None:
    fault = RequestFault.of(ValueError("two\nlines \ud800 " + "x" * 5000), "sampling")
    assert fault.message == "internal error while sampling"
    assert "\n" not in fault.cause
    assert fault.cause.encode()  # no lone surrogate
    assert len(fault.cause) < MAX_CAUSE + 200
    assert RequestFault.of(RequestError("no token is left"), "sampling") == RequestFault("no token is left")
    refused = RequestFault.of(ValidationError("no token is left", parameter="bad_words"), "sampling")
    assert refused == RequestFault("no token is left", refused=True, parameter="bad_words")
    assert isinstance(refused.exception("words"), ValidationError)
    assert isinstance(RequestFault("no token is left").exception("words"), RequestError)

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Silent" in RequestFault.of(Silent(), "sampling").cause


async def test_outputs_that_cannot_be_merged_are_the_consumers_fault() -> None:
    collector = OutputCollector(RequestOutputKind.DELTA)
    collector.put(None)  # type: ignore[arg-type]
    collector.put("not an output")  # type: ignore[arg-type]
    collector.put("another")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        await collector.get()
