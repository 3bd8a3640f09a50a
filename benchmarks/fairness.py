"""What a modest tenant waits while another one floods the server: the real scheduler, a clock of its own, no model.

    python benchmarks/fairness.py

A step takes STEP_SECONDS, and TOKEN_SECONDS for each token: figures of no machine in particular. One tenant sends 400
requests at once, the other one sends one every two seconds. The same requests are run under each policy.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.factory import make_scheduler
from octavo.messages import (
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SchedulingOptions,
    Tenant,
)

STEP_SECONDS, TOKEN_SECONDS = 0.02, 0.0008
NUM_BLOCKS = 4096
FLOOD, FLOOD_PROMPT, FLOOD_ANSWER = 400, 600, 200
MODEST, MODEST_PROMPT, MODEST_ANSWER, MODEST_EVERY = 40, 100, 50, 2.0


@dataclass
class World:
    """The scheduler, the time, and a worker that answers every sequence whose tokens are all computed."""

    config: SchedulerConfig
    now: float = 0.0
    left: dict[str, int] = field(default_factory=dict)  # known tokens that are not computed
    begun: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.config, CacheConfig(), NUM_BLOCKS, 4096, clock=lambda: self.now)

    def add(self, name: str, tenant: Tenant, prompt: int, answer: int) -> None:
        tokens = random.Random(name).choices(range(30000), k=prompt)
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        self.scheduler.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=tokens,
                sampling_params=params,
                arrival_time=self.now,
                scheduling=SchedulingOptions(tenant=tenant),
            )
        )

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.now += STEP_SECONDS + TOKEN_SECONDS * plan.total_num_scheduled_tokens
        self.num_tokens += plan.total_num_scheduled_tokens
        for output in self.scheduler.update(plan, self.compute(plan)).outputs:
            self.begun.setdefault(output.request_id, self.now)
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.now

    def compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput(step_id=plan.step_id)
        for new in plan.new_requests:
            self.left[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        for name, count in plan.num_scheduled_tokens.items():
            self.left[name] -= count
            if self.left[name] == 0:
                result.sampled_token_ids[name] = [7]
                self.left[name] = 1
        return result


def run(policy: str, max_running: int | None = None) -> tuple[list[float], float, float]:
    """(seconds to the first token of each modest request, seconds until the flood has gone, tokens per second)."""
    world = World(SchedulerConfig(scheduling_policy=policy, max_num_seqs=32))
    flood, modest = Tenant("flood", 1.0, max_running), Tenant("modest")
    for number in range(FLOOD):
        world.add(f"f{number}", flood, FLOOD_PROMPT, FLOOD_ANSWER)
    due = {f"m{number}": 1.0 + number * MODEST_EVERY for number in range(MODEST)}
    waiting = dict(due)
    while world.scheduler.has_requests() or waiting:
        for name in [name for name, when in waiting.items() if when <= world.now]:
            del waiting[name]
            world.add(name, modest, MODEST_PROMPT, MODEST_ANSWER)
        world.step()
    first = [world.begun[name] - when for name, when in due.items()]
    return first, max(when for name, when in world.ended.items() if name[0] == "f"), world.num_tokens / world.now


def main() -> None:
    print(
        "| policy | modest tenant: first token, median | 99 % | flood served after | tokens/s |\n|---|---|---|---|---|"
    )
    for name, policy, max_running in (
        ("`fcfs`", "fcfs", None),
        ("`fair`", "fair", None),
        ("`fair`, flood's `max_running = 28`", "fair", 28),
    ):
        first, gone, rate = run(policy, max_running)
        worst = statistics.quantiles(first, n=100)[98]
        print(f"| {name} | {statistics.median(first):.2f} s | {worst:.2f} s | {gone:.0f} s | {rate:.0f} |")


if __name__ == "__main__":
    main()
