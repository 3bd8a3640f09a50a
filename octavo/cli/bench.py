"""``octavo bench latency|throughput|serve|startup``: measure the engine, a server, or a server's start.

The measuring is in ``octavo.bench``; here are the flags, what is printed and what is saved.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from octavo.exceptions import ConfigError

METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    add: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
        "latency": ("seconds of one batch, engine in this process", _add_latency),
        "throughput": ("tokens/s of many prompts at once, engine in this process", _add_throughput),
        "serve": ("load on an OpenAI-compatible server: throughput, TTFT, TPOT, ITL, E2EL", _add_serve),
        "startup": ("process start to port, ready and first token; memory", _add_startup),
    }
    for kind, (text, function) in add.items():
        sub = kinds.add_parser(kind, help=text, description=text[0].upper() + text[1:] + ".")
        function(sub)
        output = sub.add_argument_group("output")
        output.add_argument("--save-result", action="store_true", help="write figures and machine facts as JSON")
        output.add_argument("--result-dir", default="", help="folder for it (default: the current one)")
        output.add_argument("--result-filename", help="its name (default: from kind and time)")


def run(namespace: argparse.Namespace) -> int:
    """Measure, print, save; 1 if every request failed."""
    kinds = {"latency": _latency, "throughput": _throughput, "serve": _serve, "startup": _startup}
    result, status = kinds[namespace.kind](namespace)
    if namespace.save_result:
        from octavo.bench.machine import machine_facts
        from octavo.bench.report import save_json

        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = namespace.result_filename or f"octavo-bench-{namespace.kind}-{stamp}.json"
        whole = {"kind": namespace.kind, **result, "machine": machine_facts()}
        print(f"saved {save_json(whole, namespace.result_dir, name)}")
    return status


# --- datasets ---------------------------------------------------------------------------------------------------------


def _add_dataset(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    group = parser.add_argument_group("dataset")
    names = ("random", "sharegpt-like", "prefix-repetition")
    group.add_argument("--dataset-name", choices=names, default="random", help="see docs/guides/benchmarking.md")
    group.add_argument("--num-prompts", type=int, default=num_prompts, help=f"requests (default: {num_prompts})")
    for flag, default, text in (
        ("--random-input-len", 1024, "prompt tokens, random"),
        ("--random-output-len", 128, "answer tokens, random"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a shared prefix"),
        ("--prefix-repetition-suffix-len", 256, "tokens of each request's own"),
        ("--prefix-repetition-num-prefixes", 10, "number of prefixes"),
        ("--prefix-repetition-output-len", 128, "answer tokens, prefix-repetition"),
        ("--vocab-size", 32_000, "prompt ids are drawn from 1,000 up to this"),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths within 1-R to 1+R (default: 0)"
    )


def _dataset(namespace: argparse.Namespace) -> Any:
    """The requests that the flags ask for. Raises ConfigError."""
    from octavo.bench.datasets import DatasetConfig, make_dataset

    if namespace.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {namespace.num_prompts}")
    return make_dataset(
        DatasetConfig(
            name=namespace.dataset_name,
            num_prompts=namespace.num_prompts,
            seed=getattr(namespace, "seed", 0),
            vocab_size=namespace.vocab_size,
            input_len=namespace.random_input_len,
            output_len=namespace.random_output_len,
            range_ratio=namespace.random_range_ratio,
            prefix_len=namespace.prefix_repetition_prefix_len,
            suffix_len=namespace.prefix_repetition_suffix_len,
            num_prefixes=namespace.prefix_repetition_num_prefixes,
            prefix_output_len=namespace.prefix_repetition_output_len,
        )
    )


# --- engine in this process -------------------------------------------------------------------------------------------


def _add_latency(parser: argparse.ArgumentParser) -> None:
    from octavo.args.engine_args import add_engine_arguments

    for flag, default, text in (
        ("--input-len", 32, "prompt tokens"),
        ("--output-len", 128, "answer tokens"),
        ("--batch-size", 8, "requests at a time"),
        ("--num-iters-warmup", 2, "iterations that are not counted"),
        ("--num-iters", 10, "iterations that are"),
        ("--vocab-size", 32_000, "prompt ids are drawn from 1,000 up to this"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add_engine_arguments(parser)


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    from octavo.args.engine_args import add_engine_arguments

    _add_dataset(parser, 64)
    parser.add_argument("--disable-detokenize", action="store_true", help="token ids only, no text")
    add_engine_arguments(parser)


def _make_llm(namespace: argparse.Namespace) -> Any:
    """An LLM with the engine flags that were given. Raises ConfigError and ModelError."""
    from octavo.args.engine_args import SECTIONS
    from octavo.entrypoints.llm import LLM

    names = [field.name for config in SECTIONS.values() for field in dataclasses.fields(config)]
    return LLM(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})


def _latency(namespace: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from octavo.bench.offline import measure_latency
    from octavo.bench.report import latency_report

    settings = {name: getattr(namespace, name) for name in ("input_len", "output_len", "batch_size", "vocab_size")}
    if min(settings.values()) < 1 or namespace.num_iters < 1 or namespace.num_iters_warmup < 0:
        raise ConfigError("lengths, --batch-size and --num-iters must be at least 1")
    with _make_llm(namespace) as llm:
        result = measure_latency(
            llm,
            warmups=namespace.num_iters_warmup,
            iterations=namespace.num_iters,
            seed=getattr(namespace, "seed", 0),
            **settings,
        )
    print(latency_report(result))
    return settings | result, 0


def _throughput(namespace: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from octavo.bench.offline import measure_throughput
    from octavo.bench.report import throughput_report

    dataset = _dataset(namespace)
    with _make_llm(namespace) as llm:
        result = measure_throughput(llm, dataset, detokenize=not namespace.disable_detokenize)
    print(throughput_report(result))
    return {"dataset": namespace.dataset_name, **result}, 0


# --- a server ---------------------------------------------------------------------------------------------------------


def _add_serve(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="(default: http://127.0.0.1:8000)")
    server.add_argument("--backend", choices=("openai", "openai-chat"), default="openai", help="which route")
    server.add_argument("--model", help="name to ask for (default: the server's first)")
    server.add_argument("--api-key", help="(default: $OPENAI_API_KEY)")
    server.add_argument("--ready-check-timeout-sec", type=float, default=600, metavar="N", help="(default: 600)")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=float("inf"), help="requests/s (default: inf, all at once)")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts (default: 1)")
    load.add_argument("--max-concurrency", type=int, help="most requests under way (default: no bound)")
    load.add_argument("--num-warmups", type=int, default=1, help="requests before measuring (default: 1)")
    load.add_argument("--request-timeout", type=float, default=600, metavar="N", help="seconds (default: 600)")
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")
    request = parser.add_argument_group("request")
    request.add_argument("--ignore-eos", action="store_true", help="answers of exactly the wanted length")
    request.add_argument("--temperature", type=float, default=0.0, help="(default: 0)")
    request.add_argument("--prompt-as-text", action="store_true", help="words in place of token ids")
    request.add_argument(
        "--continuous-usage", action="store_true", help="count tokens in every chunk (where chunks hold several)"
    )
    request.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="more request fields")
    _add_dataset(parser, 1000)
    metrics = parser.add_argument_group("metrics")
    metrics.add_argument("--percentile-metrics", type=_metric_list, default=METRIC_NAMES, help="e.g. ttft,itl")
    metrics.add_argument("--metric-percentiles", type=_percentile_list, default=(99.0,), help="e.g. 50,90,99")
    metrics.add_argument("--save-detailed", action="store_true", help="every request's figures in the JSON")
    metrics.add_argument("--plot", metavar="FILE.png", help="draw distributions and throughput (needs octavo[bench])")


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _metric_list(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(METRIC_NAMES):
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(METRIC_NAMES)}")
    return names


def _percentile_list(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError("percentiles lie between 0 and 100")
    return values


def _serve(namespace: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from octavo.bench.figures import summarise
    from octavo.bench.plot import check_plot, draw
    from octavo.bench.report import serve_report

    if namespace.plot:
        check_plot(namespace.plot)
    if namespace.max_concurrency is not None and namespace.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {namespace.max_concurrency}")
    load, outcome = asyncio.run(_drive(namespace))
    metrics, percentiles = namespace.percentile_metrics, namespace.metric_percentiles
    result = summarise(outcome.records, outcome.duration, metrics, percentiles)
    arrived = max(1, sum(len(record.arrivals) for record in outcome.records))
    result["client_cpu_us_per_token"] = outcome.client_cpu / arrived * 1e6
    print(serve_report(result, metrics, percentiles))
    errors = [record.error for record in outcome.records if record.error is not None]
    for error in sorted(set(errors), key=errors.index)[:5]:
        print(f"{errors.count(error)} failed: {error}", file=sys.stderr)
    if namespace.plot:
        title = f"{load.model}, {namespace.dataset_name}, {result['output_throughput']:.1f} output tokens/s"
        draw(outcome.records, title, namespace.plot)
        print(f"drawn {namespace.plot}")
    settings = dataclasses.asdict(load) | {"dataset": namespace.dataset_name, "num_prompts": namespace.num_prompts}
    settings["request_rate"] = "inf" if load.request_rate == float("inf") else load.request_rate
    saved: dict[str, Any] = {**settings, **result, "errors": errors}
    if namespace.save_detailed:
        saved["requests"] = [dataclasses.asdict(record) for record in outcome.records]
    return saved, 1 if result["completed"] == 0 else 0


async def _drive(namespace: argparse.Namespace) -> tuple[Any, Any]:
    """(LoadConfig, LoadResult) of the load that the flags ask for. Raises ConfigError and RequestError."""
    from octavo.bench.client import Client
    from octavo.bench.load import LoadConfig, arrival_times, first_model, send_load, wait_until_ready

    dataset = _dataset(namespace)
    arrival_times(1, namespace.request_rate, namespace.burstiness, namespace.seed)  # refuses before it waits
    key = namespace.api_key or os.environ.get("OPENAI_API_KEY")
    client = Client(namespace.base_url, key, namespace.request_timeout)
    await wait_until_ready(client, namespace.ready_check_timeout_sec)
    load = LoadConfig(
        backend=namespace.backend,
        model=namespace.model or await first_model(client),
        request_rate=namespace.request_rate,
        burstiness=namespace.burstiness,
        max_concurrency=namespace.max_concurrency,
        num_warmups=namespace.num_warmups,
        ignore_eos=namespace.ignore_eos,
        temperature=namespace.temperature,
        continuous_usage=namespace.continuous_usage,
        as_words=namespace.prompt_as_text,
        extra_body=namespace.extra_body,
        seed=namespace.seed,
    )
    return load, await send_load(client, dataset, load)


# --- start ------------------------------------------------------------------------------------------------------------


def _add_startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="in the cache already (octavo pull MODEL)")
    parser.add_argument("--num-iters", type=int, default=5, help="starts, each a new process (default: 5)")
    parser.add_argument("--serve-args", type=shlex.split, default=[], help="more flags of octavo serve, in one string")
    parser.add_argument(
        "--server-command",
        type=shlex.split,
        help="another server's command line; {port} is filled in, the model must be named m",
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a start may take (default: 300)")


def _startup(namespace: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from octavo.bench.startup import free_port, measure_startup, octavo_command

    if namespace.num_iters < 1:
        raise ConfigError(f"--num-iters must be at least 1, got {namespace.num_iters}")
    runs = []
    for _ in range(namespace.num_iters):
        port = free_port()
        if namespace.server_command:
            command = [word.replace("{port}", str(port)) for word in namespace.server_command]
        else:
            command = octavo_command(namespace.model, port, namespace.serve_args)
        runs.append(measure_startup(command, port, timeout=namespace.timeout))
    labels = {"port_s": "port answers, s", "ready_s": "ready, s", "first_token_s": "first token, s"}
    labels |= {"rss": "RSS, MB", "peak_rss": "peak RSS, MB"}
    medians = {name: statistics.median(run[name] for run in runs) for name in labels}
    for name, label in labels.items():
        values = [run[name] / (1 if name.endswith("_s") else 1e6) for run in runs]
        print(f"{label:16s} median {statistics.median(values):8.2f}   {min(values):.2f} .. {max(values):.2f}")
    return {"model": namespace.model, "runs": runs, "median": medians}, 0
