"""Both prefix indexes, and the order "longest prefix first", on the same traces through the real scheduler.

    python benchmarks/prefix_index.py [--rounds 3] [--traces chat,few-shot,...]

No model: a step takes no time, and each request's answer is in the trace. Printed for each trace, by setting: the share
of prompt tokens found in the cache, the CPU time of the index (with all hashing, and what its listeners note) and of
the whole scheduler for each request, the bytes of the index per cached block, and the longest wait, in steps.

Expected before the first run (blocks of 16 tokens, so a hit that may end anywhere is 7.5 tokens longer on average):

- hit rate: radix ahead by 7.5 / the mean prompt where prompts share, so 1 to 2 points; none ahead without sharing.
- CPU: radix cheaper where most of a prompt is found, since what is found is not hashed; dearer by a few percent without
  sharing, where it hashes as much and keeps a tree besides.
- memory: alike; a label takes 64 bytes of a block where a dictionary's entry takes about 100.
- order: many points where prompts of several kinds wait and the pool cannot hold all kinds (few-shot, agents), few in
  chat and trees, where who waits has a prefix of its own; no request waits much longer, because of the bound.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.factory import make_scheduler
from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.prefix_index import Match, PrefixIndex
from octavo.core.kv_cache.radix_index import RadixIndex
from octavo.core.request import Request
from octavo.messages import EngineCoreRequest, ModelRunnerOutput, SamplingParams

BLOCK, NUM_BLOCKS, SEATS, STEP_TOKENS = 16, 1000, 16, 512
VOCAB = 50_000
OVERTAKES = 32  # of "longest prefix first"
SETTINGS = {
    "hash": ("hash", 0),
    "radix": ("radix", 0),
    "hash, longest prefix first": ("hash", OVERTAKES),
    "radix, longest prefix first": ("radix", OVERTAKES),
}


@dataclass
class Turn:
    """One request: its prompt, its answer, and what is asked when the answer is there."""

    prompt: list[int]
    answer: list[int]
    then: list[Turn] = field(default_factory=list)


class Words:
    """Random tokens of random lengths."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def some(self, least: int, most: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(self.random.randint(least, most))]


def chat() -> list[Turn]:
    """120 conversations of 2 to 6 turns behind one of two short system prompts."""
    words = Words("chat")
    systems = [words.some(60, 90) for _ in range(2)]

    def conversation(context: list[int], turns: int) -> Turn:
        turn = Turn(context + words.some(10, 80), words.some(40, 200))
        if turns > 1:
            turn.then = [conversation(turn.prompt + turn.answer, turns - 1)]
        return turn

    return [conversation(words.random.choice(systems), words.random.randint(2, 6)) for _ in range(120)]


def few_shot() -> list[Turn]:
    """600 questions behind one of 30 sets of examples, in random order: together the sets fill the pool 1.9 times."""
    words = Words("few-shot")
    examples = [words.some(600, 1400) for _ in range(30)]
    return [Turn(words.random.choice(examples) + words.some(20, 60), words.some(2, 20)) for _ in range(600)]


def tree_of_thought() -> list[Turn]:
    """25 problems; each thought is followed by three others until the fourth level: 40 requests a problem."""
    words = Words("tree")

    def think(context: list[int], level: int) -> Turn:
        turn = Turn(context, words.some(20, 80))
        if level < 3:
            turn.then = [think(turn.prompt + turn.answer + words.some(5, 15), level + 1) for _ in range(3)]
        return turn

    return [think(words.some(150, 400), 0) for _ in range(25)]


def agents() -> list[Turn]:
    """100 runs of 3 to 8 steps by eight kinds of agents with long instructions; each step adds a tool's result."""
    words = Words("agents")
    instructions = [words.some(1000, 2500) for _ in range(8)]

    def run(context: list[int], steps: int) -> Turn:
        turn = Turn(context, words.some(20, 80))
        if steps > 1:
            turn.then = [run(turn.prompt + turn.answer + words.some(20, 300), steps - 1)]
        return turn

    return [
        run(words.random.choice(instructions) + words.some(20, 100), words.random.randint(3, 8)) for _ in range(100)
    ]


def no_sharing() -> list[Turn]:
    """400 prompts that have nothing in common."""
    words = Words("none")
    return [Turn(words.some(100, 800), words.some(20, 150)) for _ in range(400)]


TRACES = {
    "chat": chat,
    "few-shot": few_shot,
    "tree of thought": tree_of_thought,
    "agents": agents,
    "no sharing": no_sharing,
}


@dataclass
class Outcome:
    hit_rate: float
    cpu_us: float
    index_us: float
    bytes_per_block: float
    longest_wait: int


class Timed:
    """A PrefixIndex around another one that measures its CPU time, in ns."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index, self.names, self.spent = index, index.names, 0

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, block: Block) -> bool:
        return block in self.index

    def match(self, request: Request, num_tokens: int) -> Match:
        start = time.thread_time_ns()
        found = self.index.match(request, num_tokens)
        self.spent += time.thread_time_ns() - start
        return found

    def insert(self, request: Request, blocks: Sequence[Block], num_tokens: int, *, first: int = 0) -> None:
        start = time.thread_time_ns()
        self.index.insert(request, blocks, num_tokens, first=first)
        self.spent += time.thread_time_ns() - start

    def remove(self, block: Block) -> None:
        start = time.thread_time_ns()
        self.index.remove(block)
        self.spent += time.thread_time_ns() - start

    def clear(self) -> None:
        self.index.clear()


class Run:
    """All of a trace through one scheduler; the sessions start at random in the first ``SPREAD`` steps."""

    SPREAD = 400

    def __init__(self, turns: list[Turn], index: str, overtakes: int, *, timed: bool = False) -> None:
        config = SchedulerConfig(max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS, longest_prefix_first=overtakes)
        cache = CacheConfig(block_size=BLOCK, prefix_index=index)  # type: ignore[arg-type]
        self.scheduler = make_scheduler(config, cache, NUM_BLOCKS, 16_384)
        kv = self.scheduler._kv
        self.index: PrefixIndex = kv.index
        self.timed = Timed(kv.index)
        if timed:
            kv.index = kv.pool.index = self.timed  # type: ignore[assignment]
        rng = random.Random(0)
        self.coming = deque(
            sorted(((rng.randrange(self.SPREAD), i, turn) for i, turn in enumerate(turns)), key=lambda x: x[:2])
        )
        self.turns: dict[str, Turn] = {}
        self.given: dict[str, int] = {}
        self.came: dict[str, int] = {}
        self.cpu = 0.0
        self.bytes_per_block = 0.0
        self.hits = self.queries = self.longest_wait = 0

    def go(self) -> Outcome:
        step = 0
        while self.coming or self.scheduler.has_requests():
            new = []
            while self.coming and self.coming[0][0] <= step:
                new.append(self._ask(self.coming.popleft()[2], step))
            self._step(step, new)
            step += 1
        self.scheduler.check_invariants()
        count = len(self.turns)
        return Outcome(
            hit_rate=self.hits / self.queries,
            cpu_us=1e6 * self.cpu / count,
            index_us=1e-3 * self.timed.spent / count,
            bytes_per_block=self.bytes_per_block,
            longest_wait=self.longest_wait,
        )

    def _ask(self, turn: Turn, step: int) -> EngineCoreRequest:
        name = str(len(self.turns))
        self.turns[name], self.given[name], self.came[name] = turn, 0, step
        params = SamplingParams(max_tokens=len(turn.answer), ignore_eos=True)
        return EngineCoreRequest(
            request_id=name, prompt_token_ids=turn.prompt, sampling_params=params, arrival_time=0.0
        )

    def _step(self, step: int, new: list[EngineCoreRequest]) -> None:
        start = time.process_time()
        for request in new:
            self.scheduler.add_request(request)
        plan = self.scheduler.schedule()
        self.cpu += time.process_time() - start
        for admitted in plan.new_requests:
            self.longest_wait = max(self.longest_wait, step - self.came.pop(admitted.request_id, step))
        sampled = {name: [token] for name in plan.num_scheduled_tokens for token in self._next(name)}
        result = ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=sampled)
        start = time.process_time()
        outputs = self.scheduler.update(plan, result)
        self.cpu += time.process_time() - start
        if step % 50 == 49:
            self.bytes_per_block = max(self.bytes_per_block, bytes_per_block(self.index))
        assert outputs.stats is not None
        self.hits += outputs.stats.prefix_cache_hits_delta
        self.queries += outputs.stats.prefix_cache_queries_delta
        for output in outputs.outputs:
            self.given[output.request_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                for i, turn in enumerate(self.turns[output.request_id].then):
                    self.coming.append((step + 1 + i, 0, turn))
        self.coming = deque(sorted(self.coming, key=lambda x: x[0]))

    def _next(self, name: str) -> Iterator[int]:
        """The token that ``name`` would sample now."""
        answer = self.turns[name].answer
        yield answer[min(self.given[name], len(answer) - 1)]


def bytes_per_block(index: PrefixIndex) -> float:
    """Of all that the index keeps of a cached block: names, entries, the tree."""
    names, entries = index.names.blocks, list(index.names.entries())
    total = sys.getsizeof(names) + sum(map(sys.getsizeof, names))
    total += sum(sys.getsizeof(entry) + sys.getsizeof(entry.token_ids) for entry in entries)
    waiting = list(index._roots.values()) if isinstance(index, RadixIndex) else []
    while waiting:
        node = waiting.pop()
        parts = (node, node.label, node.blocks, node.keys, node.children, *node.keys)
        total += sum(map(sys.getsizeof, parts))
        waiting += node.children
    return total / max(len(index), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the CPU time is the least of so many")
    parser.add_argument("--traces", default=",".join(TRACES))
    options = parser.parse_args()
    print(f"each cell: {', '.join(SETTINGS)}")
    print(
        "| trace | hits, % of prompt tokens | index, µs a request | scheduler, µs a request "
        "| bytes a block | longest wait, steps |"
    )
    print("|---|---|---|---|---|---|")
    for trace in options.traces.split(","):
        plain: dict[str, list[Outcome]] = {name: [] for name in SETTINGS}
        timed: dict[str, list[Outcome]] = {name: [] for name in SETTINGS}
        for _ in range(options.rounds):
            for name, (index, overtakes) in SETTINGS.items():
                plain[name].append(Run(TRACES[trace](), index, overtakes).go())
                timed[name].append(Run(TRACES[trace](), index, overtakes, timed=True).go())
        columns = [
            row(plain, lambda outcome: 100 * outcome.hit_rate, ".1f"),
            row(timed, lambda outcome: outcome.index_us, ".0f"),
            row(plain, lambda outcome: outcome.cpu_us, ".0f"),
            row(plain, lambda outcome: outcome.bytes_per_block, ".0f"),
            row(plain, lambda outcome: outcome.longest_wait, "d"),
        ]
        print("| " + " | ".join([trace, *columns]) + " |", flush=True)


def row(outcomes: dict[str, list[Outcome]], value: Callable[[Outcome], float], form: str) -> str:
    """The least of each setting's rounds."""
    return ", ".join(format(min(map(value, found)), form) for found in outcomes.values())


if __name__ == "__main__":
    main()
