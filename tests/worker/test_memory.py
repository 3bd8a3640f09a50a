"""What is planned is what is taken: weights, buffers and blocks to the byte, on models of every format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.registry import make_backend
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.exceptions import ConfigError
from octavo.messages import KVCacheSpec, MemoryPlan
from octavo.model_loader import outline_model
from octavo.platforms.cpu import CpuPlatform
from octavo.structured_output.checker import MAX_PROCESSES
from octavo.worker import memory
from octavo.worker.memory import Machine, make_limits, plan_memory
from octavo.worker.worker import Worker
from tests.core.kv_parts import kv_specs
from tests.model_loader.checkpoints import write as write_gguf
from tests.models.tiny import save

GIB = 1 << 30
FORMATS = ["F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
GEMMA = {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40}


def config_of(model: Path | str, **changes: Any) -> EngineConfig:
    """CPU backend, one thread, nothing kept on disk; ``changes`` are fields of any section."""
    sections: dict[str, Any] = {
        "model": ModelConfig(model=str(model)),
        "cache": CacheConfig(),
        "scheduler": SchedulerConfig(max_num_seqs=4),
        "backend": BackendConfig(backend="cpu", threads=1, weights_cache=False),
    }
    for name, value in changes.items():
        section = next(key for key, one in sections.items() if hasattr(one, name))
        sections[section] = dataclasses.replace(sections[section], **{name: value})
    return EngineConfig(**sections)


def plan_of(config: EngineConfig, **machine: Any) -> MemoryPlan:
    machine = {"memory": 8 * GIB} | machine
    return plan_memory(outline_model(config.model), make_backend(config.backend), config, Machine(**machine))


class PlatformOf(CpuPlatform):
    """This machine with ``memory`` bytes, of which octavo has taken none."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self._memory = memory

    def available_memory(self) -> int:
        return self._memory

    def resident_memory(self, pid: int | None = None) -> int:
        return 0

    def address_space_room(self) -> int | None:
        return None


def loaded(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryPlan, Worker, int]:
    """The plan that a worker makes and follows on a machine with 8 GiB, that worker, and the bytes of its arena."""
    arenas: list[int] = []
    make = CpuBackend._new_program

    def counted(self: CpuBackend, pool: Any, program: Any, limits: Any, arena_floats: int) -> Any:
        arenas.append(4 * arena_floats)
        return make(self, pool, program, limits, arena_floats)

    monkeypatch.setattr(CpuBackend, "_new_program", counted)
    one = Worker(config, PlatformOf(8 * GIB))
    one.load_model()
    plan = one.plan_memory()
    one.initialize_kv_cache(plan)
    return plan, one, arenas[0]


def check(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, one, arena = loaded(config, monkeypatch)
    runnable: Any = one._runnable
    assert plan.weights == runnable.weight_bytes
    assert plan.block_bytes == runnable.block_bytes
    assert plan.num_blocks * plan.block_bytes == runnable._native.kv_bytes
    assert runnable.limits.num_blocks == plan.num_blocks
    assert runnable.limits.max_blocks_per_seq == -(-plan.max_model_len // config.cache.block_size)
    program = outline_model(config.model).program
    longest = make_limits(program, config, program.max_position, 0)
    assert plan.activations == arena + CpuBackend(config.backend)._attention_bytes(program, longest)
    assert plan == plan_of(config), "headers alone say the same"


@pytest.mark.parametrize("kind", FORMATS)
def test_gguf(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path, intermediate_size=64)
    check(config_of(write_gguf(tmp_path / "m.gguf", model, "llama", kind)), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma3"])
def test_folders(kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, kind, dtype=dtype, **(GEMMA if kind == "Gemma3" else {}))
    check(config_of(tmp_path, block_size=32), monkeypatch)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e5m2"])
def test_kv_dtypes(kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "Gemma3", **GEMMA | {"head_dim": 24})  # rows of 24 numbers take the place of 32
    check(config_of(tmp_path, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=100), monkeypatch)


def test_tokens_take_numbers_and_scales_of_keys_and_values(tmp_path: Path) -> None:
    save(tmp_path)
    program = outline_model(config_of(tmp_path).model).program
    heads, dim = 2 * sum(layer.num_heads for layer in program.kv_layers), program.kv_layers[0].key_dim
    sizes = {}
    for dtype in ("auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"):
        sizes[dtype] = plan_of(config_of(tmp_path, kv_cache_dtype=dtype)).kv.bytes_per_token
    assert sizes["auto"] == sizes["bfloat16"] == heads * 2 * dim
    assert sizes["int8"] == sizes["fp8_e4m3"] == sizes["fp8_e5m2"] == heads * (dim + 4)


def test_the_default_model(smollm2_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(smollm2_path, max_num_seqs=64, threads=2, kv_cache_memory=64 << 20), monkeypatch)


def test_the_reference_backend(tmp_path: Path) -> None:
    save(tmp_path)
    config = config_of(tmp_path, backend="reference")
    one = Worker(config, PlatformOf(8 * GIB))
    one.load_model()
    plan = one.plan_memory()
    one.initialize_kv_cache(plan)
    assert plan.weights == one._runnable.weight_bytes
    assert plan.block_bytes == one._runnable.block_bytes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 positions; a block takes 2 KiB, and the 2112 bytes between blocks."""
    folder = tmp_path_factory.mktemp("tiny")
    save(folder)
    return folder


def memory_for(config: EngineConfig, num_blocks: int) -> int:
    """Bytes of a machine that has room for so many blocks."""
    plan = plan_of(config)
    blocks = num_blocks * (plan.block_bytes + plan.book_bytes)
    return int((plan.fixed + blocks) / (1 - memory.SPARE_SHARE)) + 64


def test_the_cache_holds_all_that_can_run_and_no_more(tiny: Path) -> None:
    assert plan_of(config_of(tiny)).num_blocks == 4 * 256 // 16 + 1
    assert plan_of(config_of(tiny, max_model_len=20)).num_blocks == 4 * 2 + 1
    assert plan_of(config_of(tiny)).max_model_len == 256


def test_a_share_of_what_is_left_but_room_for_the_longest_request(tiny: Path) -> None:
    config = config_of(tiny)
    assert plan_of(config, memory=memory_for(config, 100)).num_blocks == 40
    one = plan_of(config, memory=memory_for(config, 25))
    assert (one.num_blocks, one.max_model_len, one.refusal) == (17, 256, "")


def test_the_context_shrinks_to_the_memory_unless_it_was_asked_for(tiny: Path) -> None:
    config = config_of(tiny)
    plan = plan_of(config, memory=memory_for(config, 10))
    assert (plan.num_blocks, plan.max_model_len, plan.refusal) == (8, 7 * 16, "")
    asked = plan_of(config_of(tiny, max_model_len=256), memory=memory_for(config, 10))
    assert "at most --max-model-len 144 fits" in asked.refusal
    assert "not enough memory" in asked.refusal
    fits = config_of(tiny, max_model_len=144)
    assert plan_of(fits, memory=memory_for(config, 10)).refusal == ""


def test_a_cache_that_is_too_large_is_refused_with_the_one_that_fits(tiny: Path) -> None:
    config = config_of(tiny)
    room = plan_of(config_of(tiny, kv_cache_memory=20 * GIB)).refusal
    assert "KV cache" in room
    assert "8.0 GiB" in room
    most = int(room.split("--kv-cache-memory ")[1].split("MiB")[0])
    assert plan_of(config_of(tiny, kv_cache_memory=most << 20)).refusal == ""
    assert plan_of(config_of(tiny, kv_cache_memory=most + 3 << 20)).refusal != ""
    small = plan_of(config_of(tiny, kv_cache_memory=100)).refusal
    assert small == "kv_cache_memory = 100: too small for a single block of KV cache; 4.0 KiB is the least"
    assert plan_of(config, memory=1 << 20).refusal.endswith(
        "are free; lower --max-num-seqs, --max-num-batched-tokens or --max-num-queued-tokens"
    )


def test_a_cache_of_the_users_own_size_bounds_the_context(tiny: Path) -> None:
    config = config_of(tiny, kv_cache_memory=6 * 2048, max_model_len=256)
    plan = plan_of(config)
    assert (plan.num_blocks, plan.max_model_len, plan.refusal) == (6, 80, "")


def test_tiers_and_address_space_count(tiny: Path) -> None:
    plain, swap = plan_of(config_of(tiny)), plan_of(config_of(tiny, swap_space=1.0))
    assert swap.total - plain.total == GIB
    assert "--swap-space" in plan_of(config_of(tiny, swap_space=9.0)).refusal
    disk = plan_of(config_of(tiny, kv_cache_dir="~/nowhere"))
    assert disk.tiers == 128 << 20
    limited = plan_of(config_of(tiny), address_space=GIB)
    assert limited.memory < GIB + limited.processes
    assert "left by ulimit -v" in plan_of(config_of(tiny), address_space=memory.ADDRESS_SPACE).refusal


def test_what_octavo_has_taken_already_is_not_counted_twice(tiny: Path) -> None:
    fresh = plan_of(config_of(tiny))
    assert plan_of(config_of(tiny), memory=8 * GIB - 1000, taken=1000) == fresh
    someone_elses = plan_of(config_of(tiny), memory=GIB, taken=100 * GIB)
    assert someone_elses.memory == GIB + someone_elses.processes


def test_an_engine_does_not_start_where_it_does_not_fit(tiny: Path) -> None:
    one = Worker(config_of(tiny), PlatformOf(1 << 20))
    one.load_model()
    with pytest.raises(ConfigError, match=r"not enough memory.*processes .* MiB.*--max-num-seqs"):
        one.plan_memory()


def test_memory_that_the_system_refuses_all_the_same(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does without overcommitment, which counts what is mapped."""

    def refuse(*_: Any) -> None:
        raise MemoryError

    one = Worker(config_of(tiny), CpuPlatform())
    one.load_model()
    plan = one.plan_memory()
    monkeypatch.setattr(CpuBackend, "prepare", refuse)
    with pytest.raises(ConfigError, match=r"the system refuses the memory that was planned: .* are needed \(KV cache"):
        one.initialize_kv_cache(plan)


def test_requests_at_once_with_windows(tiny: Path) -> None:
    """Five blocks of each full group and, for a window of 20, three of the other; the last one enters with five."""
    kv = KVCacheSpec(groups=kv_specs([None, 20], 32), block_size=16, ahead=64)
    plan = replace(plan_of(config_of(tiny)), kv=kv, max_model_len=1000)
    assert (plan.kv.blocks_for(80), plan.kv.blocks_held(80)) == (10, 8)
    for num_blocks, count in ((10, 0), (11, 1), (18, 1), (19, 2), (27, 3)):
        assert replace(plan, num_blocks=num_blocks).requests_of(80) == count
    assert replace(plan, num_blocks=1000).requests_of(1001) == 0


def test_both_grammar_checkers_are_counted() -> None:
    assert memory.GRAMMAR_CHECKERS[0] % MAX_PROCESSES == 0
    assert MAX_PROCESSES == 2
