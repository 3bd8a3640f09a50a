"""``octavo bench``, run as a person runs it, with loads that take seconds."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.exceptions import ConfigError
from tests.server.running_server import running_server

SMALL = ["--max-model-len", "256", "--kv-cache-memory", "64MiB"]


def bench(*argv: str, folder: Path) -> dict[str, Any]:
    """The saved result of a successful run."""
    saved = ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    assert main(["bench", *argv, *saved]) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert result["machine"]["physical_cores"] >= 1
    assert result["machine"]["versions"]["octavo"]
    return result


def test_latency(smollm2_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = [
        "--input-len",
        "16",
        "--output-len",
        "4",
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
    ]
    result = bench("latency", smollm2_path, *shape, *SMALL, folder=tmp_path)
    assert len(result["latencies"]) == 2
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert result["prefill_tokens_per_second"] > 0
    assert "Avg latency:" in capsys.readouterr().out


def test_throughput(smollm2_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "4", "--random-input-len", "16", "--random-output-len", "8", "--seed", "1"]
    result = bench("throughput", smollm2_path, *load, *SMALL, folder=tmp_path)
    assert (result["num_requests"], result["total_output_tokens"], result["total_num_tokens"]) == (4, 32, 96)
    assert result["output_tokens_per_second"] == pytest.approx(32 / result["elapsed_time"])
    assert "output tokens/s" in capsys.readouterr().out


def test_throughput_says_when_the_context_is_too_short(smollm2_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "2", "--random-input-len", "300", "--random-output-len", "8"]
    assert main(["bench", "throughput", smollm2_path, *load, *SMALL]) == 1
    assert "256" in capsys.readouterr().err


def test_serve(smollm2_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(smollm2_path, "--served-model-name", "tiny", *SMALL) as server:
        server.wait_until_ready()
        load = [
            "--num-prompts",
            "6",
            "--random-input-len",
            "12",
            "--random-output-len",
            "5",
            "--max-concurrency",
            "3",
            "--ignore-eos",
        ]
        plot = tmp_path / "plot.png"
        more = ["--plot", str(plot), "--metric-percentiles", "50,99", "--save-detailed"]
        result = bench("serve", "--base-url", server.url, *load, *more, folder=tmp_path)
        assert plot.read_bytes().startswith(b"\x89PNG")
        shared = "--dataset-name prefix-repetition --prefix-repetition-prefix-len 64 --num-prompts 4 --request-rate 50"
        sizes = "--prefix-repetition-suffix-len 8 --prefix-repetition-num-prefixes 1 --prefix-repetition-output-len 2"
        cached = bench(
            "serve",
            "--base-url",
            server.url,
            *shared.split(),
            *sizes.split(),
            "--max-concurrency",
            "1",
            folder=tmp_path,
        )
        chat = bench("serve", "--base-url", server.url, "--backend", "openai-chat", *load, folder=tmp_path)
        server.wait_until_idle()
    assert (result["model"], result["completed"], result["failed"]) == ("tiny", 6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (72, 30)
    assert result["max_concurrent_requests"] <= 3
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert len(result["requests"]) == 6
    assert cached["total_cached_tokens"] >= 3 * 48  # whole blocks of the prefix, in all requests but the first
    assert chat["total_output_tokens"] == 30
    assert "Median TTFT (ms):" in capsys.readouterr().out


def test_serve_counts_what_the_server_refuses(smollm2_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(smollm2_path, *SMALL) as server:
        server.wait_until_ready()
        load = ["--num-prompts", "2", "--random-input-len", "500", "--random-output-len", "5", "--num-warmups", "0"]
        assert main(["bench", "serve", "--base-url", server.url, *load]) == 1
    assert "2 failed: HTTP 400" in capsys.readouterr().err


def test_startup(smollm2_path: str, tmp_path: Path) -> None:
    flags = ["--num-iters", "1", "--serve-args", " ".join(SMALL)]
    (one,) = bench("startup", smollm2_path, *flags, folder=tmp_path)["runs"]
    assert 0 < one["port_s"] <= one["ready_s"] < one["first_token_s"]
    assert 0 < one["rss"] <= one["peak_rss"]


def test_startup_shows_why_a_server_did_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    command = "octavo-bench-test --port {port}"
    python = "python3 -c 'import sys; sys.exit(sys.argv[1])' broken"
    assert main(["bench", "startup", "--num-iters", "1", "--server-command", python]) == 1
    assert "broken" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        main(["bench", "startup", "--num-iters", "1", "--server-command", command])


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--base-url", "nowhere"],
        ["serve", "--num-prompts", "0"],
        ["serve", "--request-rate", "0"],
        ["serve", "--max-concurrency", "0"],
        ["serve", "--plot", "x.doc"],
        ["latency", "--num-iters", "0"],
    ],
)
def test_wrong_flags_are_a_line_and_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert capsys.readouterr().err.startswith("octavo bench: ")


def test_without_matplotlib_the_plot_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.bench.plot import check_plot

    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"octavo\[bench\]"):
        check_plot("x.png")
