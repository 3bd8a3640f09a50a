"""Where an engine's memory will go, before any of it is taken: the sizes of the KV cache and of the context.

Start-up and ``octavo plan`` both ask here, so what the one says is what the other does. Counted exactly: weights,
buffers of a step, KV blocks. The rest are upper estimates, measured in docs/guides/memory.md. Knows neither flags nor
files.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from octavo.backends.base import Backend, Limits
from octavo.config import EngineConfig
from octavo.kv_transfer.registry import tier_bytes
from octavo.messages import KVCacheSpec, KVSpec, MemoryPlan
from octavo.model_loader import ModelOutline
from octavo.platforms.base import Platform
from octavo.program import Program
from octavo.utils.units import format_bytes

# Rows of logits that a pass may hold for prompt logprobs, besides one per sequence: this many, and this many bytes.
PROMPT_ROWS = 128
PROMPT_ROW_BYTES = 48 << 20

# KV blocks take at most this much, and this share of the memory left over, when the user gives no number; up to the
# second share so that one sequence can reach the model's own length.
DEFAULT_KV_BYTES = 4 << 30
DEFAULT_KV_SHARE = 0.4
LONGEST_KV_SHARE = 0.8

SPARE_SHARE = 0.02  # of all memory, for what is not counted: page tables, sockets, fragmentation

# Python objects, in bytes
BLOCK_NAME = 300  # a block, its hash and its entry in the prefix index
TOKEN_ID = 40  # an int and its place in a list
QUEUED_TOKEN = 2 * TOKEN_ID  # in the front end and in the scheduler
LOGPROB = 100  # an id and its logprob on the way to the client

# Processes with all that they import, and with the model's vocabulary, as measured: (bytes, bytes by token of it).
FRONT_END = (76 << 20, 800)
ENGINE_CORE = (60 << 20, 700)
GRAMMAR_CHECKERS = (2 * (26 << 20), 2 * 190)

# Address space that no part accounts for: stacks and allocator arenas of threads, and the grammars' stack.
ADDRESS_SPACE = 384 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """``memory``: bytes that octavo may take, what it has taken of them (``taken``) not included.

    ``address_space``: bytes that the engine core may still map; None without a limit.
    """

    memory: int
    taken: int = 0
    address_space: int | None = None


def this_machine(platform: Platform, taken: int = 0) -> Machine:
    """What ``platform`` says of the one this runs on; ``taken`` is what octavo's processes take already."""
    return Machine(platform.available_memory(), taken, platform.address_space_room())


def make_limits(program: Program, config: EngineConfig, max_model_len: int, num_blocks: int) -> Limits:
    """The sizes that a backend has to be ready for."""
    prompt_rows = max(1, min(PROMPT_ROWS, PROMPT_ROW_BYTES // (4 * program.vocab_size)))
    return Limits(
        max_tokens=config.scheduler.step_tokens,
        max_rows=config.scheduler.most_sampled + prompt_rows,
        max_seqs=config.scheduler.max_num_seqs,
        max_blocks_per_seq=-(-max_model_len // config.cache.block_size),
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        kv_dtype=config.cache.kv_dtype,
    )


def plan_memory(model: ModelOutline, backend: Backend, config: EngineConfig, machine: Machine) -> MemoryPlan:
    """How an engine would spend the memory of ``machine``; its ``refusal`` says if it cannot. Raises KernelError.

    The context is as long as asked for, else as the model's own, but never longer than what the blocks hold.
    """
    asked = config.model.max_model_len
    longest = asked or model.info.max_position
    empty = _without_kv(model, backend, config, longest)
    empty = replace(empty, memory=_memory(empty, model, machine))
    room = max(0, int(empty.memory * (1 - SPARE_SHARE)) - empty.fixed) // (empty.block_bytes + empty.book_bytes)
    num_blocks = _choose_blocks(config, empty.kv, room, longest)
    length = min(longest, empty.kv.tokens_in(num_blocks))
    requests = _requests_bytes(config, empty.kv, length)
    plan = replace(empty, num_blocks=num_blocks, max_model_len=length, requests=requests)
    there = "are free" if plan.memory >= machine.memory else "are left by ulimit -v and -d"
    return replace(plan, refusal=_refusal(plan, config, room, there))


def _without_kv(model: ModelOutline, backend: Backend, config: EngineConfig, longest: int) -> MemoryPlan:
    """All but what depends on the machine and on the number of blocks; sequences may have ``longest`` tokens."""
    program, limits = model.program, make_limits(model.program, config, longest, 0)
    footprint = backend.footprint(program, model.weights, limits)
    kv = KVCacheSpec(
        groups=_kv_specs(program, backend, limits),
        block_size=limits.block_size,
        ahead=config.scheduler.tokens_ahead,
    )
    return MemoryPlan(
        memory=0,
        processes=sum(size + each * program.vocab_size for size, each in (FRONT_END, ENGINE_CORE, GRAMMAR_CHECKERS)),
        weights=footprint.weights,
        activations=footprint.activations,
        sampling=footprint.sampling + _sampling_bytes(config, program.vocab_size),
        requests=_requests_bytes(config, kv, longest),
        queue=QUEUED_TOKEN * config.queue.max_num_queued_tokens,
        tiers=tier_bytes(config.cache),
        packing=footprint.packing,
        block_bytes=footprint.kv_block,
        book_bytes=BLOCK_NAME + TOKEN_ID * limits.block_size // len(kv.groups),
        kv=kv,
        num_blocks=0,
        max_model_len=0,
    )


def _kv_specs(program: Program, backend: Backend, limits: Limits) -> tuple[KVSpec, ...]:
    """Of each group of layers. A group that leaves a part of its blocks empty takes as much as the widest."""
    sizes = [backend.kv_bytes(layer, limits.kv_dtype) for layer in program.kv_layers]
    most = max(sum(sizes[layer] for layer in group.layers) for group in program.kv_groups)
    return tuple(KVSpec(kind=group.kind, bytes_per_token=most, window=group.window) for group in program.kv_groups)


def _sampling_bytes(config: EngineConfig, vocab_size: int) -> int:
    """If each sampled row of logits is changed and masked, and gives as many logprobs as it may."""
    most = config.sampling.max_logprobs
    num_logprobs = 1 + (vocab_size if most < 0 else min(most, vocab_size))
    return config.scheduler.most_sampled * (4 * vocab_size + vocab_size // 8 + num_logprobs * LOGPROB)


def _requests_bytes(config: EngineConfig, kv: KVCacheSpec, longest: int) -> int:
    """Of each sequence: token ids, and a block table, which is copied for a step."""
    return 4 * config.scheduler.max_num_seqs * (longest + 2 * kv.entries_for(longest))


def _memory(plan: MemoryPlan, model: ModelOutline, machine: Machine) -> int:
    """Bytes that the whole of octavo may take. The engine core maps the model's file beside all that it is to hold."""
    memory = machine.memory + min(machine.taken, plan.processes)
    if machine.address_space is not None:
        memory = min(memory, machine.address_space - ADDRESS_SPACE - model.info.weight_bytes + plan.processes)
    return max(0, memory)


def _choose_blocks(config: EngineConfig, kv: KVCacheSpec, room: int, longest: int) -> int:
    """How many blocks to have where there is room for ``room``."""
    if config.cache.kv_cache_memory is not None:
        return config.cache.kv_cache_memory // kv.bytes_per_block
    one, all_seqs = kv.blocks_for(longest) + 1, config.scheduler.max_num_seqs * kv.blocks_for(longest) + 1
    usual = min(int(DEFAULT_KV_SHARE * room), DEFAULT_KV_BYTES // kv.bytes_per_block, all_seqs)
    return max(usual, min(one, int(LONGEST_KV_SHARE * room)) if config.model.max_model_len is None else one)


def _refusal(plan: MemoryPlan, config: EngineConfig, room: int, there: str) -> str:
    """Why an engine does not start so, and which flags help; empty if it does. ``there``: how there is memory."""
    given, kv = config.cache.kv_cache_memory, plan.kv
    holds_nothing = plan.max_model_len < 2
    if given is not None and holds_nothing:
        least = format_bytes((1 + len(kv.groups)) * kv.bytes_per_block)
        return f"kv_cache_memory = {given}: too small for a single block of KV cache; {least} is the least"
    if plan.num_blocks <= room and not holds_nothing:
        return ""
    fitting = kv.tokens_in(room)
    if fitting < 2:
        tiers = " --swap-space," if plan.tiers else ""
        advice = f"lower{tiers} --max-num-seqs, --max-num-batched-tokens or --max-num-queued-tokens"
    elif given is not None:
        advice = f"at most --kv-cache-memory {room * kv.bytes_per_block >> 20}MiB fits"
    else:
        advice = f"at most --max-model-len {fitting} fits"
        if config.cache.kv_dtype in ("auto", "bfloat16"):
            advice += "; --kv-cache-dtype int8 takes about half"
    return f"not enough memory: {plan.explained}, but only {format_bytes(plan.memory)} {there}; {advice}"
