"""The engines that compare.py knows: how each is started, as a runner or as a server, on the same model and threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

RUNNERS = Path(__file__).parent / "runners"
ROOT = Path(__file__).parents[2]
HF_FOLDER = "model-bf16"
SLOTS, SLOT_TOKENS = 32, 1024  # of llama-server: requests at a time, and the room of each
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


def default_peers_dir() -> Path:
    return Path(os.environ.get("OCTAVO_PEERS", Path.home() / ".cache" / "octavo-peers"))


def python_of(peers: Path, name: str) -> str:
    return str(peers / name / "bin" / "python")


@dataclass(frozen=True)
class Engine:
    """``runner`` and ``server`` are command lines, None where there is no such thing; ``needs`` must exist."""

    name: str
    needs: Path
    runner: list[str] | None = None
    server: Callable[[int], list[str]] | None = None
    llama_bench: list[str] | None = None  # llama.cpp's own measure of decoding and prefill
    env: dict[str, str] = field(default_factory=dict)


def make_engines(peers: Path, gguf: str, threads: int) -> dict[str, Engine]:
    """Every engine, installed or not, by name."""
    engines = [
        _octavo(gguf, threads),
        _llama_cpp(peers, "llama.cpp", gguf, threads),
        _llama_cpp(peers, "llama.cpp-q4_0", str(peers / "llama.cpp" / "model-q4_0.gguf"), threads),
        _runner(peers, "openvino", gguf, threads),
        _runner(peers, "transformers", gguf, threads),
        _vllm(peers, threads),
    ]
    return {engine.name: engine for engine in engines}


def _octavo(gguf: str, threads: int) -> Engine:
    flags = ["--threads", str(threads), "--max-model-len", "2048", "--kv-cache-memory", "1GiB"]

    def server(port: int) -> list[str]:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", gguf]
        return [*command, "--served-model-name", "m", "--port", str(port), *flags]

    runner = [sys.executable, str(RUNNERS / "octavo_runner.py"), gguf, str(threads)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Engine("octavo", Path(sys.executable), runner, server, env={"PYTHONPATH": path})


def _llama_cpp(peers: Path, name: str, gguf: str, threads: int) -> Engine:
    binaries = peers / "llama.cpp" / "build" / "bin"

    def server(port: int) -> list[str]:
        return [
            *(str(binaries / "llama-server"), "-m", gguf, "--alias", "m", "--host", "127.0.0.1", "--port", str(port)),
            *("-t", str(threads), "-tb", str(threads), "--parallel", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS)),
        ]

    bench = [str(binaries / "llama-bench"), "-m", gguf, "-t", str(threads), "-r", "1", "-o", "json"]
    return Engine(name, Path(gguf) if name != "llama.cpp" else binaries / "llama-server", None, server, bench)


def _runner(peers: Path, name: str, gguf: str, threads: int) -> Engine:
    python = python_of(peers, name)
    return Engine(name, Path(python), [python, str(RUNNERS / f"{name}_runner.py"), gguf, str(threads)])


def _vllm(peers: Path, threads: int) -> Engine:
    """vLLM as tuned for two cores: by default it leaves one of them idle; tcmalloc and Intel's OpenMP where present."""
    python, folder = python_of(peers, "vllm"), str(peers / HF_FOLDER)
    preload = [path for path in (TCMALLOC, peers / "vllm" / "lib" / "libiomp5.so") if path.exists()]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "LD_PRELOAD": ":".join(map(str, preload)),
        "PATH": os.pathsep.join([str(peers / "vllm" / "bin"), os.environ.get("PATH", "")]),
    }

    def server(port: int) -> list[str]:
        return [
            # not the vllm command: it looks for a package of that name, and this one is called vllm-cpu
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", "2048", "--max-num-seqs", "64"),
        ]

    runner = [python, str(RUNNERS / "vllm_runner.py"), folder, str(threads)]
    return Engine("vllm", Path(python), runner, server, env=env)
