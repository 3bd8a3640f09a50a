"""An engine core that breaks on request: what a request's seed says goes wrong for it, at the stage that it names.

Tests put :data:`BOOTSTRAP` in the place of ``octavo.engine.core_client.BOOTSTRAP``, the one line by which a front end
starts its core process. Everything else in that process is octavo's own code.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from typing import Any

import numpy as np

from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.exceptions import InvariantError
from octavo.messages import ModelRunnerOutput, SchedulerOutput
from octavo.worker.model_runner import ModelRunner
from octavo.worker.request_states import RequestStates
from octavo.worker.sample import sampler
from octavo.worker.worker import Worker

BOOTSTRAP = (
    "import time; t = time.monotonic(); import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tests.faults.faulty_core import main; main(t)"
)
SECRET = "secret-path"  # in the message of every exception raised here


class Fault(enum.IntEnum):
    """Seeds that break something. The first group ends the core; the second, a request."""

    KILL = 666_000  # by SIGKILL, as the kernel does when memory runs out
    SEGFAULT = 666_001
    HANG = 666_002  # in its step
    KILL_LATER = 666_003  # at its fourth token
    LOSE_A_BLOCK = 666_004  # the pool's books are wrong from then on

    QUEUE = 666_100
    SCHEDULE = 666_101
    PREPARE = 666_102
    SAMPLE = 666_103
    NAN = 666_104
    TAKE_IN = 666_105

    DETOKENIZE = 666_200  # these two in the front end: see ``faulty_serve``
    FORMAT = 666_201


OF_ONE_REQUEST = [fault for fault in Fault if fault >= Fault.QUEUE]


def fails(source: Any, fault: Fault) -> bool:
    """Whether the request (of any kind that has sampling parameters) asks for ``fault``."""
    return bool(source.sampling_params.seed == fault)


def raise_for(owner: type, name: str, fault: Fault, argument: int) -> None:
    """Let ``owner.name`` raise when its positional ``argument`` (self is 0) asks for ``fault``."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if fails(args[argument], fault):
            raise ZeroDivisionError(SECRET)
        return original(*args, **kwargs)

    setattr(owner, name, method)


class Breaking:
    """A logits processor that raises."""

    def apply(self, *_: Any) -> None:
        raise ZeroDivisionError(SECRET)


def break_worker() -> None:
    execute, seeds = Worker.execute_model, {}

    def execute_model(self: Worker, plan: SchedulerOutput) -> ModelRunnerOutput:
        seeds.update({new.request_id: new.sampling_params.seed for new in plan.new_requests})
        steps = {seeds[request_id] for request_id in plan.num_scheduled_tokens}
        if Fault.KILL in steps:
            os.kill(os.getpid(), signal.SIGKILL)
        if Fault.SEGFAULT in steps:
            os.kill(os.getpid(), signal.SIGSEGV)
        if Fault.HANG in steps:
            time.sleep(1000)
        for cached in plan.cached_requests:
            if seeds[cached.request_id] == Fault.KILL_LATER and cached.num_computed_tokens >= 4:
                os.kill(os.getpid(), signal.SIGKILL)
        return execute(self, plan)

    Worker.execute_model = execute_model  # type: ignore[method-assign]
    raise_for(RequestStates, "add", Fault.PREPARE, 1)
    sampler.PROCESSORS = (*sampler.PROCESSORS, lambda new: Breaking() if fails(new, Fault.SAMPLE) else None)
    collect = ModelRunner._collect

    def with_nan(self: ModelRunner, batch: Any, logits: Any, id_of_row: dict[int, str], output: Any) -> None:
        for row, logit in zip(batch.sampled_rows.tolist(), batch.sampled_logits.tolist()):
            if seeds[id_of_row[row]] == Fault.NAN:
                logits[logit] = np.nan
        collect(self, batch, logits, id_of_row, output)

    ModelRunner._collect = with_nan  # type: ignore[method-assign]


def break_scheduler() -> None:
    raise_for(Request, "__init__", Fault.QUEUE, 1)
    raise_for(Request, "advance", Fault.SCHEDULE, 0)
    raise_for(Request, "append", Fault.TAKE_IN, 0)
    check, add = Scheduler.check_invariants, Scheduler.add_request
    wrong: list[str] = []

    def add_request(self: Scheduler, request: Any) -> None:
        if fails(request, Fault.LOSE_A_BLOCK):
            wrong.append(request.request_id)
        add(self, request)

    def check_invariants(self: Scheduler) -> None:
        if wrong:
            raise InvariantError("a block is lost")
        check(self)

    Scheduler.add_request, Scheduler.check_invariants = add_request, check_invariants  # type: ignore[method-assign]


def main(started: float) -> None:
    """The core process's entry point, as ``octavo.engine.core_proc.main``."""
    from octavo.engine import core_proc

    break_worker()
    break_scheduler()
    core_proc.IDLE_CHECK_MS = 50
    core_proc.main(started)
