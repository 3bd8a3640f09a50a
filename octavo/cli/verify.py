"""``octavo verify MODEL``: the promise of equal bits, tried on the user's own model."""

from __future__ import annotations

import argparse

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.config.choices import KV_CACHE_DTYPES
from octavo.entrypoints.terminal import download_bar
from octavo.verify.ways import verify_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="catalogue name, GGUF file, folder or hub id")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--cache-dir", help="where models are kept (default: $OCTAVO_CACHE or ~/.cache/octavo)")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="how K and V are kept")


def run(namespace: argparse.Namespace) -> int:
    """Print what was proved; 1 on a difference."""
    config = engine_config_from_kwargs(model=namespace.model, cache_dir=namespace.cache_dir)
    with download_bar() as progress:
        path = resolve_engine_config(config, progress).model.model
    results = verify_model(
        path,
        quick=namespace.quick,
        kv_cache_dtype=namespace.kv_cache_dtype,
        cache_dir=namespace.cache_dir,
        report=print,
    )
    failed = [result.name for result in results if not result.equal]
    if failed:
        print(f"NOT equal: {', '.join(failed)}")
        return 1
    tokens = sum(result.num_tokens for result in results)
    print(f"proved: {tokens} tokens in {len(results)} settings, ids and logprobs equal bit for bit")
    return 0
