"""A request whose grammar is not compiled yet waits alone."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec

from octavo.config import SchedulerConfig
from octavo.core.admission import GrammarReady
from octavo.core.factory import make_scheduler
from octavo.core.scheduler import Scheduler
from octavo.messages import EngineCoreRequest, OutputOptions
from tests.core.checking_worker import cache_config, make_request


class Compiler:
    """Grammars are ready when the test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[object]] = {}

    def prepare(self, grammar: str) -> Future[object]:
        return self.futures.setdefault(grammar, Future())


def constrained(request_id: str, grammar: str, **fields: int) -> EngineCoreRequest:
    return msgspec.structs.replace(make_request(request_id, [1, 2, 3], **fields), output=OutputOptions(grammar=grammar))


def make(compiler: Compiler, **options: int) -> tuple[Scheduler, GrammarReady]:
    readiness = GrammarReady(compiler.prepare)
    return make_scheduler(SchedulerConfig(**options), cache_config(4), 100, 1000, requirements=[readiness]), readiness


def test_those_behind_go_first_and_nobody_is_lost() -> None:
    compiler = Compiler()
    scheduler, _ = make(compiler, max_num_seqs=8)
    scheduler.add_request(constrained("slow", "A"))
    scheduler.add_request(make_request("plain", [4]))
    scheduler.add_request(constrained("other", "B"))
    scheduler.add_request(constrained("twin", "A"))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["plain"]
    assert scheduler.num_waiting == 3
    compiler.futures["B"].set_result(None)
    assert "other" in scheduler.schedule().num_scheduled_tokens
    compiler.futures["A"].set_result(None)
    plan = scheduler.schedule()
    assert [new.request_id for new in plan.new_requests] == ["slow", "twin"]  # in order of arrival
    assert {new.output.grammar for new in plan.new_requests} == {"A"}
    scheduler.check_invariants()


def test_one_that_lacks_room_still_holds_back_those_behind() -> None:
    """Readiness is the request's own affair, room is everybody's: nobody may be starved by smaller ones."""
    compiler = Compiler()
    scheduler, _ = make(compiler, max_num_seqs=1)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [4]))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a"]
    scheduler.add_request(constrained("c", "A"))
    scheduler.abort(["a"])
    assert list(scheduler.schedule().num_scheduled_tokens) == ["b"]


def test_a_grammar_that_does_not_compile_lets_its_request_go_and_fail_in_the_worker() -> None:
    compiler = Compiler()
    scheduler, _ = make(compiler)
    scheduler.add_request(constrained("bad", "A"))
    assert scheduler.schedule().is_empty
    compiler.futures["A"].set_exception(ValueError("nonsense"))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["bad"]


def test_an_aborted_one_is_forgotten() -> None:
    compiler = Compiler()
    scheduler, readiness = make(compiler)
    scheduler.add_request(constrained("gone", "A"))
    assert scheduler.schedule().is_empty
    assert [output.request_id for output in scheduler.abort(["gone"])] == ["gone"]
    assert not scheduler.has_requests()
    assert readiness.wait(0.0)
    assert not readiness.wait(0.0)


def test_waiting_is_for_what_was_missing_lately() -> None:
    compiler = Compiler()
    scheduler, readiness = make(compiler)
    assert not readiness.wait(60.0)
    scheduler.add_request(constrained("a", "A"))
    scheduler.schedule()
    compiler.futures["A"].set_result(None)
    assert readiness.wait(60.0)
    scheduler.schedule()
    assert not readiness.wait(60.0)


def test_a_compiler_that_raises_blocks_nobody() -> None:
    def broken(grammar: str) -> Future[object]:
        raise RuntimeError("no")

    scheduler = make_scheduler(SchedulerConfig(), cache_config(4), 100, 1000, requirements=[GrammarReady(broken)])
    scheduler.add_request(constrained("a", "A"))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a"]
