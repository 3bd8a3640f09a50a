"""What an import costs and which way imports may point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "torch", "tokenizers", "jinja2", "fastapi", "pydantic", "uvicorn", "zmq", "prometheus_client",
         "huggingface_hub", "safetensors", "rich", "asyncio", "msgspec"}  # fmt: skip


def modules_after(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(out.stdout))


def loaded_after(statement: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_after(statement)}


def test_import_octavo_loads_nothing_heavy() -> None:
    baseline = loaded_after("pass")
    assert (loaded_after("import octavo") - baseline) & HEAVY == set()


def test_help_needs_no_engine() -> None:
    heavy = HEAVY - {"asyncio", "msgspec"}
    assert loaded_after("import octavo.cli.main") & heavy == set()


def test_engine_core_process_needs_no_http_and_no_torch() -> None:
    loaded = loaded_after("import octavo.engine.core_proc")
    assert loaded & {"fastapi", "uvicorn", "torch", "transformers", "pydantic"} == set()


def test_a_front_end_starts_the_core_without_what_only_the_core_needs() -> None:
    """The core process cannot start before these imports have ended."""
    loaded = modules_after("import octavo.cli.serve, octavo.args.resolve, octavo.engine.async_llm")
    assert loaded & {"numpy", "llguidance", "tokenizers", "fastapi", "uvicorn", "octavo.core"} == set()


def test_import_contracts() -> None:
    """The layer contracts of pyproject.toml hold (import-linter)."""
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
