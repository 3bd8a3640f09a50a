"""A real server beside its plan, and servers that the system gives little."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.bench.startup import memory_bytes, process_tree
from tests.server.running_server import ROOT, running_server

FLAGS = ["--kv-cache-memory", "48MiB", "--max-num-seqs", "16", "--max-model-len", "1k", "--max-num-queued-tokens", "8k"]


def test_a_full_server_takes_what_was_planned(smollm2_path: str) -> None:
    """Requests of all kinds fill the cache. Loose bounds: much of it is interpreters, measured on one machine."""
    command = [sys.executable, "-m", "octavo.cli.main", "plan", smollm2_path, "--json", *FLAGS]
    plan = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120).stdout)
    with running_server(smollm2_path, "--served-model-name", "m", *FLAGS) as server:
        server.wait_until_ready()
        assert f"{plan['num_blocks'] - 1} blocks of 16 = {plan['num_tokens']} tokens" in server.output
        for pid in process_tree(server.process.pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the highest resident set so far
        client = server.client()

        def ask(number: int) -> str:
            tokens = [1000 + (number * 997 + i * 31) % 40000 for i in range(plan["num_tokens"] // 8 - 8)]
            more = {"structured_outputs": {"regex": "[a-z ]{99}"}} if number % 2 else {"prompt_logprobs": 5}
            body = more | {"repetition_penalty": 1.1, "ignore_eos": True}
            answer = client.completions.create(model="m", prompt=tokens, max_tokens=8, logprobs=5, extra_body=body)
            return str(answer.choices[0].finish_reason)

        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(ask, range(8))) == {"length"}
        taken = memory_bytes(server.process.pid)["peak_rss"]
    assert 0.7 * plan["total"] < taken < 1.1 * plan["total"]


@pytest.mark.parametrize("limit", [900 << 20, 3 << 30])
def test_an_engine_within_a_limit_of_address_space(smollm2_path: str, limit: int) -> None:
    """It says that it does not fit, or it does: all of it, since memory is mapped when the engine starts."""
    code = (
        "import sys; from octavo import LLM, SamplingParams; from octavo.exceptions import ConfigError\n"
        "try: llm = LLM(sys.argv[1], threads=2, max_num_seqs=64)\n"
        "except ConfigError as error: sys.exit(str(error))\n"
        "llm.generate('Hello', SamplingParams(max_tokens=2, logprobs=5, presence_penalty=1), use_tqdm=False)\n"
        "print(llm._live_engine().info.num_blocks)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, smollm2_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    if limit < 1 << 30:
        assert done.returncode == 1
        assert "are left by ulimit -v and -d" in done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) * 16 * 23040 < limit
