"""``octavo pull NAME``: fetch a model into the cache, and say where it is."""

from __future__ import annotations

import argparse

from octavo.catalog import resolve_model
from octavo.entrypoints.progress import download_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="catalogue name or hub id")
    parser.add_argument("--cache-dir", help="where models are kept (default: $OCTAVO_CACHE or ~/.cache/octavo)")


def run(namespace: argparse.Namespace) -> int:
    """Print the local path; nothing is fetched that is there already."""
    with download_bar() as progress:
        path = resolve_model(namespace.name, namespace.cache_dir, progress)
    print(path)
    return 0
