"""``octavo plan MODEL``: where the memory would go, from the model's headers alone, here or on another machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.args.engine_args import add_engine_arguments, converter, engine_config_from_namespace
from octavo.args.resolve import resolve_engine_config
from octavo.backends.registry import make_backend
from octavo.config import EngineConfig
from octavo.engine.core_builder import check_length
from octavo.entrypoints.terminal import download_bar
from octavo.exceptions import ConfigError
from octavo.messages import MemoryPlan
from octavo.model_loader import ModelFacts, outline_model
from octavo.platforms.registry import make_platform
from octavo.program import LayerKV
from octavo.utils.units import format_bytes
from octavo.worker.memory import Machine, plan_memory, this_machine

LENGTHS = (1024, 8192, 32768)  # of requests, where no flag says
KV_DTYPES = ("bf16", "int8", "fp8")


@dataclass(frozen=True)
class Plan:
    """``of_dtype``: the same engine with K and V kept in another way. ``lengths``: tokens of requests to count.

    ``element_size``: bytes of a number of the KV cache; ``scale_size``: of the scale of one token's K, or V, of a head.
    ``layers_per_block``: most layers of a group.
    """

    config: EngineConfig
    info: ModelFacts
    machine: Machine
    memory: MemoryPlan
    element_size: int
    scale_size: int
    layers_per_block: int
    of_dtype: dict[str, MemoryPlan]
    lengths: tuple[int, ...]


def make_plan(config: EngineConfig, machine: Machine, lengths: tuple[int, ...] = LENGTHS) -> Plan:
    """The plan of a resolved ``config``. Raises ModelError, ConfigError or KernelError."""
    model, backend = outline_model(config.model), make_backend(config.backend)
    check_length(config.model, model.info)

    def plan(dtype: Any) -> MemoryPlan:
        cache = dataclasses.replace(config.cache, kv_cache_dtype=dtype)
        return plan_memory(model, backend, dataclasses.replace(config, cache=cache), machine)

    of_dtype = {dtype: plan(dtype) for dtype in KV_DTYPES}
    one, two = (backend.kv_bytes(LayerKV(1, size, size), config.cache.kv_dtype) for size in (1, 2))
    return Plan(
        config=config,
        info=model.info,
        machine=machine,
        memory=plan(config.cache.kv_cache_dtype),
        element_size=(two - one) // 2,
        scale_size=(2 * one - two) // 2,
        layers_per_block=max(len(group.layers) for group in model.program.kv_groups),
        of_dtype=of_dtype,
        lengths=lengths,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    size = converter({"size": True}, int)
    group.add_argument("--memory", type=size, metavar="SIZE", help="memory of another machine, e.g. 16GiB")
    group.add_argument("--cores", type=int, metavar="N", help="its physical cores (default: this one's)")
    tokens = converter({"tokens": True}, int)
    group.add_argument("--input-len", type=tokens, metavar="N", help="tokens of the prompts to count requests of")
    group.add_argument("--output-len", type=tokens, metavar="N", help="tokens of their answers (default: 0)")
    group.add_argument("--json", action="store_true", help="print it as JSON")
    add_engine_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Print the plan; 1 if an engine would not start."""
    config = engine_config_from_namespace(namespace)
    for name, least in (("memory", 1), ("cores", 1), ("input_len", 1), ("output_len", 0)):
        value = getattr(namespace, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} = {value}: must be at least {least}")
    if namespace.cores is not None and config.backend.threads is None:
        config = dataclasses.replace(config, backend=dataclasses.replace(config.backend, threads=namespace.cores))
    with download_bar() as progress:
        config = resolve_engine_config(config, progress, weights=False)
    platform = make_platform()
    machine = this_machine(platform) if namespace.memory is None else Machine(namespace.memory)
    asked = (namespace.input_len or 0) + (namespace.output_len or 0)
    plan = make_plan(config, machine, (asked,) if asked else LENGTHS)
    if namespace.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print_plan(plan, platform.device_name() if namespace.memory is None else "another machine")
    return 1 if plan.memory.refusal else 0


def as_json(plan: Plan) -> dict[str, Any]:
    """All numbers of the plan, in bytes and tokens."""

    def numbers(memory: MemoryPlan) -> dict[str, Any]:
        requests = {str(length): memory.requests_of(length) for length in plan.lengths}
        return {
            "num_blocks": memory.num_blocks,
            "num_tokens": memory.num_tokens,
            "kv_bytes": memory.kv_bytes,
            "total": memory.total,
            "max_model_len": memory.max_model_len,
            "refusal": memory.refusal,
            "requests_at_once": requests,
        }

    return {
        "model": plan.config.model.served_model_name,
        "architecture": plan.info.architecture,
        "weights_format": plan.info.weights_format,
        "threads": plan.config.backend.threads,
        **msgspec.to_builtins(plan.memory),
        "kv": kv_shape(plan),
        **numbers(plan.memory),
        "kv_cache_dtypes": {dtype: numbers(memory) for dtype, memory in plan.of_dtype.items()},
    }


def kv_shape(plan: Plan) -> dict[str, Any]:
    """What a block of the KV cache holds, and which tokens the groups of layers see (None: all).

    Of layers that differ, the most KV heads and the widest.
    """
    layers, kv = plan.info.kv_layers, plan.memory.kv
    return {
        "num_layers": plan.layers_per_block,
        "num_kv_heads": max(layer.num_heads for layer in layers),
        "head_dim": max(max(layer.key_dim, layer.value_dim) for layer in layers),
        "element_size": plan.element_size,
        "block_size": kv.block_size,
        "scale_size": plan.scale_size,
        "windows": [group.window for group in kv.groups],
        "ahead": kv.ahead,
    }


def parts_of(plan: Plan) -> list[tuple[str, int, str]]:
    """(part, bytes, what that is for); parts that take nothing are left out."""
    config, memory = plan.config, plan.memory
    parts = [
        ("weights", memory.weights, f"{plan.info.weights_format}, packed"),
        ("activations", memory.activations, f"steps of {config.scheduler.step_tokens} tokens"),
        ("sampling", memory.sampling, f"{config.scheduler.max_num_seqs} requests at once"),
        ("requests", memory.requests, f"of up to {memory.max_model_len} tokens"),
        ("queue", memory.queue, f"{config.queue.max_num_queued_tokens} tokens may wait"),
        ("tiers", memory.tiers, "KV blocks that the cache has no room for"),
        ("processes", memory.processes, "server, engine core, check of grammars"),
        ("KV cache", memory.kv_bytes, f"{max(0, memory.num_blocks - 1)} blocks, {memory.num_tokens} tokens"),
        ("total", memory.total, ""),
    ]
    return [part for part in parts if part[1] > 0]


def facts_of(plan: Plan, machine: str) -> list[tuple[str, str]]:
    """(name, what the plan is about)."""
    config, info, memory = plan.config, plan.info, plan.memory
    heads = " or ".join(dict.fromkeys(_heads_of(layer) for layer in info.kv_layers))
    sliding = [layer.window for layer in info.kv_layers if layer.window is not None]
    windows = f", {len(sliding)} of which see {max(sliding)} tokens" if sliding else ""
    context = f"{memory.max_model_len} tokens"
    if memory.max_model_len < info.max_position:
        context += f" of the model's {info.max_position}"
    threads = config.backend.threads
    return [
        ("model", f"{config.model.served_model_name}: {info.architecture}"),
        ("layers", f"{info.num_layers} with {heads}{windows}"),
        ("context", context),
        ("machine", f"{machine}, {threads} core{'s' if threads != 1 else ''}, {format_bytes(memory.memory)} free"),
    ]


def _heads_of(layer: LayerKV) -> str:
    """What a layer keeps, e.g. "3 KV heads of 64"."""
    sizes = str(layer.key_dim) if layer.key_dim == layer.value_dim else f"{layer.key_dim} + {layer.value_dim}"
    return f"{layer.num_heads} KV head{'s' if layer.num_heads > 1 else ''} of {sizes}"


def kv_table(plan: Plan) -> list[list[str]]:
    """Rows of text, the first one the header: what each way to keep K and V makes of the same machine."""
    rows = [["KV cache as", "bytes/token", "tokens", *(f"x {length}" for length in plan.lengths)]]
    for dtype, memory in plan.of_dtype.items():
        counts = [str(memory.requests_of(length)) if length <= memory.max_model_len else "-" for length in plan.lengths]
        rows.append([dtype, str(memory.kv.bytes_per_token), str(memory.num_tokens), *counts])
    return rows


def print_plan(plan: Plan, machine: str) -> None:
    """For people."""
    memory = plan.memory
    for name, fact in facts_of(plan, machine):
        print(f"{name:12} {fact}")
    print()
    for part, size, what in parts_of(plan):
        print(f"{part:12} {format_bytes(size):>9}  {what}".rstrip())
    print()
    for row in kv_table(plan):
        print(f"{row[0]:12} " + "".join(f"{cell:>12}" for cell in row[1:]))
    print(f"{'':12} requests of so many tokens at once; --max-num-seqs lets {plan.config.scheduler.max_num_seqs} run\n")
    print(_verdict(memory))


def _verdict(memory: MemoryPlan) -> str:
    if memory.refusal:
        return f"does NOT fit: {memory.refusal}"
    text = f"fits: {format_bytes(memory.total)} of {format_bytes(memory.memory)}"
    packing = memory.processes + memory.weights + memory.packing
    if packing > memory.total:
        text += f", but the first start takes up to {format_bytes(packing)} while it packs the weights"
    return text
