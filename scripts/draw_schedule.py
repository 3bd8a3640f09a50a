"""Draw what the scheduler does, step by step: the figures of docs/concepts come from here.

    python scripts/draw_schedule.py scheduler
    python scripts/draw_schedule.py prefix-cache
    python scripts/draw_schedule.py paged-kv
    python scripts/draw_schedule.py fork

Runs the real scheduler; in place of a model, every sampled token is 7.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.factory import make_scheduler
from octavo.messages import EngineCoreRequest, ModelRunnerOutput, SamplingParams


class Drawing:
    """A scheduler, a worker that always says 7, and a table with a line per step."""

    def __init__(self, names: str, *, num_blocks: int, max_num_batched_tokens: int) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens)
        self.scheduler = make_scheduler(config, CacheConfig(block_size=16), num_blocks, 512)
        self.tables: dict[str, list[int]] = {}
        self.names = names.split()
        print("step  " + "".join(f"{name:>4}" for name in self.names) + "   block tables after the step was planned")

    def add(self, name: str, prompt: list[int], max_tokens: int, n: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, n=n)
        request = EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0)
        self.scheduler.add_request(request)

    def steps(self, count: int) -> None:
        for _ in range(count):
            plan = self.scheduler.schedule()
            for name in plan.finished_request_ids:
                del self.tables[name]
            for new in plan.new_requests:
                self.tables[new.request_id] = list(new.block_ids)
            for cached in plan.cached_requests:
                table = self.tables[cached.request_id]
                table[len(table) - cached.num_replaced :] = cached.new_block_ids
            numbers = "".join(f"{plan.num_scheduled_tokens.get(name, '.'):>4}" for name in self.names)
            tables = "  ".join(f"{name}[{' '.join(map(str, ids))}]" for name, ids in sorted(self.tables.items()))
            gone = f"   (forget {', '.join(plan.finished_request_ids)})" if plan.finished_request_ids else ""
            copies = "".join(f"   copy {source} to {destination}" for source, destination in plan.block_copies)
            print(f"{plan.step_id:>4}  {numbers}   {tables}{copies}{gone}")
            sampled = {name: [7] for name in self.names}
            self.scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=sampled))
            self.scheduler.check_invariants()


def scheduler() -> None:
    """Two chats, then a long prompt in chunks, in a pool of 7 usable blocks that is too small for all."""
    drawing = Drawing("A B C", num_blocks=8, max_num_batched_tokens=32)
    drawing.add("A", [1] * 30, 8)
    drawing.add("B", [2] * 14, 40)
    drawing.steps(2)
    drawing.add("C", [3] * 50, 3)
    drawing.steps(10)


def prefix_cache() -> None:
    """Three requests with the same first 40 tokens: one alone, then two at once."""
    system = list(range(40))
    drawing = Drawing("A B C", num_blocks=12, max_num_batched_tokens=128)
    drawing.add("A", [*system, 101, 102, 103], 2)
    drawing.steps(3)
    drawing.add("B", [*system, 201, 202], 2)
    drawing.add("C", [*system, 201, 202, 203, 204, 205, 206, 207, 208, 209, 210], 2)
    drawing.steps(3)
    blocks = drawing.scheduler._kv.pool._free
    print("free list, next to be reused first (* = still cached): ", end="")
    print(" ".join(f"{block.block_id}{'*' if block.is_cached else ''}" for block in blocks))


def paged_kv() -> None:
    """Five requests of mixed lengths in a pool of 31 usable blocks: who owns each block, and how much of it is used."""
    names, lengths = "ABCDE", ((70, 60), (20, 90), (100, 20), (9, 100), (45, 12))
    scheduler = make_scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256), CacheConfig(), 32, 512)
    for name, (prompt, answer) in zip(names, lengths):
        params = SamplingParams(max_tokens=answer)
        ids = list(range(1000 * ord(name), 1000 * ord(name) + prompt))
        scheduler.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=ids, sampling_params=params, arrival_time=0.0)
        )
    print("step  blocks 1 .. 31 (letter: owner; *: free, still cached; .: free)   tokens / slots held")
    for step in range(120):
        plan = scheduler.schedule()
        sampled = {name: [7] for name in plan.num_scheduled_tokens}
        if step % 12 == 0:
            tables = {r.request_id: scheduler._kv.block_ids(r) for r in scheduler._running}
            owner = {block: name for name, ids in tables.items() for block in ids}
            cells = [
                owner.get(block.block_id, "*" if block.is_cached else ".") for block in scheduler._kv.pool.blocks[1:]
            ]
            held = 16 * len(owner)
            used = sum(r.num_computed_tokens for r in scheduler._running)
            print(f"{step:>4}  {''.join(cells)}   {used:>4} / {held:<4}" + (f" = {used / held:.0%}" if held else ""))
        scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=sampled))


def fork() -> None:
    """One prompt of 40 tokens, three answers of four."""
    drawing = Drawing("A.0 A.1 A.2", num_blocks=16, max_num_batched_tokens=128)
    drawing.add("A", [1] * 40, 4, n=3)
    drawing.steps(5)


FIGURES: dict[str, Callable[[], None]] = {
    "scheduler": scheduler,
    "prefix-cache": prefix_cache,
    "paged-kv": paged_kv,
    "fork": fork,
}

if __name__ == "__main__":
    FIGURES[sys.argv[1]]()
