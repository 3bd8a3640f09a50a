"""``octavo plan MODEL``: what weights and KV cache will take, from the model's headers alone."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from octavo.args.engine_args import add_engine_arguments, engine_config_from_namespace
from octavo.args.resolve import resolve_engine_config
from octavo.backends.registry import make_backend
from octavo.cli.units import format_bytes
from octavo.config import EngineConfig
from octavo.entrypoints.progress import download_bar
from octavo.messages import KVCacheSpec
from octavo.model_loader import ModelInfo, inspect_model
from octavo.platforms.cpu import available_memory, cpu_name
from octavo.worker.worker import default_kv_memory

CONTEXTS = (1024, 8192, 32768)


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes. ``kv_memory`` is what the blocks may take in all."""

    info: ModelInfo
    spec: KVCacheSpec
    max_model_len: int
    free_memory: int
    kv_memory: int

    @property
    def num_blocks(self) -> int:
        """Blocks that hold tokens; one more is the null block."""
        return max(0, self.kv_memory // self.spec.bytes_per_block - 1)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks // len(self.spec.windows) * self.spec.block_size

    def requests_of(self, context: int) -> int:
        """How many requests of ``context`` tokens fit into the blocks side by side, blocks before windows included."""
        return self.num_blocks // (-(-context // self.spec.block_size) * len(self.spec.windows))


def make_plan(config: EngineConfig, free_memory: int) -> Plan:
    """The plan of a resolved ``config`` on a machine with ``free_memory`` bytes. Raises ModelError."""
    info = inspect_model(config.model.model, config.model)
    backend, kv_dtype = make_backend(config.backend), config.cache.kv_dtype
    spec = KVCacheSpec(
        num_layers=info.kv_groups.layers_per_block,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        element_size=backend.kv_element_size(kv_dtype),
        block_size=config.cache.block_size,
        scale_size=backend.kv_scale_size(kv_dtype),
        windows=info.kv_groups.windows,
    )
    limit = config.model.max_model_len or info.max_position
    blocks = config.scheduler.max_num_seqs * -(-limit // spec.block_size) * len(spec.windows) + 1
    wanted = blocks * spec.bytes_per_block
    default = default_kv_memory(free=free_memory, reserved=info.weight_bytes, wanted=wanted)
    return Plan(info, spec, limit, free_memory, config.cache.kv_cache_memory or default)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)


def lines_of(plan: Plan, name: str | None) -> list[str]:
    """The plan in words, without its table."""
    info, spec = plan.info, plan.spec
    layers, bytes_per_token = len(spec.windows) * spec.num_layers, len(spec.windows) * spec.bytes_per_token
    head = f"{spec.head_dim} x {spec.element_size} bytes"
    if spec.scale_size:
        head = f"({head} + {spec.scale_size} for the scale)"
    return [
        f"model      {name} ({info.architecture}, {info.num_layers} layers, {info.num_kv_heads} KV heads of "
        f"{info.head_dim}, context {plan.max_model_len})",
        f"machine    {cpu_name()}, {format_bytes(plan.free_memory)} free",
        f"weights    {format_bytes(info.weight_bytes)} as {info.weights_format}",
        f"KV cache   {bytes_per_token} bytes a token = 2 x {layers} layers x {spec.num_kv_heads} KV heads x {head}",
        f"           {format_bytes(plan.kv_memory)} hold {plan.num_blocks} blocks of {spec.block_size} = "
        f"{plan.num_tokens} tokens",
    ]


def run(namespace: argparse.Namespace) -> int:
    """Print the plan; 1 if the model does not fit into the free memory."""
    from rich.console import Console
    from rich.table import Table

    with download_bar() as progress:
        config = resolve_engine_config(engine_config_from_namespace(namespace), progress)
    plan = make_plan(config, available_memory())
    console = Console(highlight=False, soft_wrap=True)
    for line in lines_of(plan, config.model.served_model_name):
        console.print(line, markup=False)
    table = Table("context", "KV bytes", "requests that fit", "")
    for context in CONTEXTS:
        note = f"beyond the context of {plan.max_model_len}" if context > plan.max_model_len else ""
        size = format_bytes(context * plan.spec.bytes_per_token * len(plan.spec.windows))
        table.add_row(f"{context // 1024}k", size, str(plan.requests_of(context)), note)
    console.print(table)
    needed = plan.info.weight_bytes + plan.kv_memory
    fits = needed <= plan.free_memory
    verdict = "fits" if fits else "does NOT fit"
    console.print(f"{format_bytes(needed)} in all: {verdict} into the {format_bytes(plan.free_memory)} free")
    return 0 if fits else 1
