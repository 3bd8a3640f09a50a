"""``octavo pull NAME``: fetch a model into the cache, and say where it is. ``--list`` shows the catalogue."""

from __future__ import annotations

import argparse

from octavo.catalog import cache_root, catalogue, resolve_model
from octavo.entrypoints.terminal import download_bar
from octavo.exceptions import ConfigError
from octavo.utils.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="catalogue name or hub id")
    parser.add_argument("--list", action="store_true", help="show the catalogue's names instead")
    parser.add_argument("--cache-dir", help="where models are kept (default: $OCTAVO_CACHE or ~/.cache/octavo)")


def run(namespace: argparse.Namespace) -> int:
    """Print the local path; nothing is fetched that is there already. Raises ConfigError without a name."""
    if namespace.list:
        for line in list_models(namespace.cache_dir):
            print(line)
        return 0
    if namespace.name is None:
        raise ConfigError("name a model, or ask for --list")
    with download_bar() as progress:
        path = resolve_model(namespace.name, namespace.cache_dir, progress)
    print(path)
    return 0


def list_models(cache_dir: str | None) -> list[str]:
    """A line for each model of the catalogue: name, size, whether it is cached, title and licence."""
    models = cache_root(cache_dir) / "models"
    return [
        f"{name:20} {format_bytes(entry.size):>9}  {'cached' if (models / name / entry.file).is_file() else '':6}  "
        f"{entry.title}, {entry.license}"
        for name, entry in catalogue().items()
    ]
