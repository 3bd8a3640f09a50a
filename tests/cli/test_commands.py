"""The other commands, run as a person runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import COMMANDS, main
from octavo.utils.units import format_bytes

ROOT = Path(__file__).parents[2]


def octavo(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, input=stdin)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"octavo {command}" in capsys.readouterr().out


def test_version_and_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("octavo ")
    assert main([]) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--max-modle-len", "5"], "did you mean --max-model-len"),
        (["bench", "serve", "--num-promts=3"], "did you mean --num-prompts"),
        (["serve", "--gpu-memory-utilization", "0.9"], "--kv-cache-memory 2GiB"),
        (["plan", "m", "--xyzzy"], "see octavo plan --help"),
    ],
)
def test_an_unknown_flag_is_one_line_with_what_is_meant(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_generate_continues_the_prompt(smollm2_path: str) -> None:
    done = octavo("generate", "The capital of France is", "--model", smollm2_path, "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    piped = octavo(
        *("generate", "-", "--chat", "--model", smollm2_path, "--max-tokens", "20"),
        stdin="What is the capital of France?",
    )
    assert "Paris" in piped.stdout


def test_generate_refuses_in_a_line(smollm2_path: str) -> None:
    done = octavo("generate", "x", "--model", smollm2_path, "--temperature", "9")
    assert done.returncode == 1
    assert "temperature" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough(smollm2_path: str) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "generate", "x", "--model", smollm2_path, "--max-tokens", "40"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(120) == 141


def test_text_that_the_terminal_or_the_tokenizer_cannot_take(smollm2_path: str) -> None:
    model = ("--model", smollm2_path, "--max-tokens", "3", "--temperature", "0")
    command = [sys.executable, "-m", "octavo.cli.main", "generate", *model]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([*command, "日本語🎉🚀日本語🎉"], cwd=ROOT, capture_output=True, env=ascii_only, timeout=120)
    assert shown.returncode == 0, shown.stderr
    refused = subprocess.run([*command, "-"], cwd=ROOT, capture_output=True, input=b"caf\xe9", timeout=120)
    assert refused.returncode == 1
    assert b"not Unicode" in refused.stderr
    assert b"Traceback" not in refused.stderr


def test_chat_answers_line_by_line_and_remembers(smollm2_path: str) -> None:
    lines = "What is the capital of France? Answer in one sentence.\n/clear\n/help\n\nSay hello.\n/exit\nnever read\n"
    done = octavo("chat", smollm2_path, "--max-tokens", "12", "--system", "You are brief.", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "/exit leaves" in done.stdout
    assert len(done.stdout.splitlines()) >= 3


def test_chat_says_that_a_line_is_too_long_and_goes_on(smollm2_path: str) -> None:
    lines = "word " * 200 + "\nWhat is the capital of France?\n"
    done = octavo("chat", smollm2_path, "--max-model-len", "128", "--max-tokens", "12", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "128" in done.stdout
    assert "Paris" in done.stdout


def test_ctrl_c_stops_the_answer_and_not_the_chat(smollm2_path: str) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "chat", smollm2_path, "--max-tokens", "4000"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(b"Count from 1 to 2000, one number a line.\n")
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(b"/help\n/exit\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    answer = (first + rest).partition(b"/exit leaves")
    assert answer[1]
    assert b"2000" not in answer[0]


def test_pull_prints_the_path_and_fails_in_a_line(smollm2_path: str) -> None:
    assert octavo("pull", "smollm2-135m").stdout.strip() == smollm2_path
    (listed,) = [line for line in octavo("pull", "--list").stdout.splitlines() if line.startswith("smollm2-135m ")]
    assert "cached" in listed
    assert octavo("pull").returncode == 2
    missing = octavo("pull", "/nowhere/at/all.gguf")
    assert missing.returncode == 1
    assert "all.gguf" in missing.stderr


def test_plan_is_a_screen_that_says_what_it_will_take(smollm2_path: str) -> None:
    machine = ("--memory", "2GiB", "--cores", "8")
    done = octavo("plan", smollm2_path, *machine, "--kv-cache-memory", "100MiB", "--served-model-name", "m")
    assert done.returncode == 0, done.stderr
    blocks = (100 << 20) // (16 * 23040) - 1
    for fact in (
        "LlamaForCausalLM",
        "30 with 3 KV heads of 64",
        "another machine, 8 cores, 2.0 GiB",
        f"{blocks} blocks, {16 * blocks} tokens",
        "steps of 256 tokens",
        "fits: ",
    ):
        assert fact in done.stdout
    table = [line.split() for line in done.stdout.splitlines() if line.startswith(("bf16", "int8", "fp8"))]
    assert table[0] == ["bf16", "23040", str(16 * blocks), str(blocks // 64), "-", "-"]  # of 1024 tokens, 8192, 32768
    assert [row[1] for row in table] == ["23040", "12240", "12240"]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_plan_in_json_for_lengths_of_the_users(smollm2_path: str) -> None:
    lengths = ("--input-len", "1k", "--output-len", "200")
    done = octavo("plan", smollm2_path, "--memory", "2GiB", "--kv-cache-memory", "100MiB", "--json", *lengths)
    plan = json.loads(done.stdout)
    blocks = (100 << 20) // (16 * 23040)
    assert plan["num_blocks"] == blocks
    assert plan["requests_at_once"] == {"1224": (blocks - 1) // -(-1224 // 16)}
    assert plan["kv_cache_dtypes"]["int8"]["num_tokens"] > 1.8 * plan["num_tokens"]
    parts = ("weights", "activations", "sampling", "requests", "queue", "tiers", "processes", "kv_bytes")
    assert plan["total"] == sum(plan[part] for part in parts)


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (("--memory", "200MiB"), 1, "does NOT fit: not enough memory"),
        (("--kv-cache-memory", "4GiB", "--memory", "2GiB"), 1, "at most --kv-cache-memory"),
        (("--memory", "2 apples"), 2, "not a size"),
        (("--cores", "0"), 2, "cores = 0: must be at least 1"),
        (("--input-len", "-5"), 2, "-5"),
        (("--max-model-len", "10k"), 2, "only 8192 positions"),
    ],
)
def test_plan_refuses(smollm2_path: str, flags: tuple[str, ...], status: int, says: str) -> None:
    done = octavo("plan", smollm2_path, *flags)
    assert done.returncode == status
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (3 << 39, "1536 GiB")]
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert format_bytes(count) == text
