"""The long run: ``python -m tests.fuzz.run --minutes 10``. Same targets and damage as the tests, until time is up.

An input that fails is written to ``--out``, with its traceback; add it to the corpus when its fault is mended.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.engine.tiny_llama import write_model, write_tokenizer
from tests.fuzz import test_files, test_requests, test_texts
from tests.fuzz.mutation import mutate, twist
from tests.parsers.parsing import PARSERS, pieces, run


def targets(folder: Path, tried: list[bytes]) -> dict[str, Callable[[random.Random], None]]:
    """By name. Each puts its input into ``tried`` before using it."""
    model = folder / "model"
    model.mkdir()
    write_model(model)
    write_tokenizer(model)

    def damage(chance: random.Random, seeds: list[bytes], focus: int = 1 << 20) -> bytes:
        tried[:] = [mutate(chance.choice(seeds), chance.getrandbits(32), chance.randint(1, 12), focus)]
        return tried[0]

    def twisting(chance: random.Random, seeds: list[bytes]) -> bytes:
        tried[:] = [twist(chance.choice(seeds), chance.getrandbits(32), chance.randint(1, 4))]
        return tried[0]

    def in_folder(name: str, content: bytes) -> None:
        test_files.survives(test_files.with_file(model, folder, name, content))

    def parse(chance: random.Random) -> None:
        text = damage(chance, test_texts.TEXTS).decode("utf-8", "replace")
        name = chance.choice(sorted(PARSERS))
        cuts = [chance.randrange(300) for _ in range(chance.randrange(6))]
        assert run(PARSERS[name](), pieces(text, cuts)) == run(PARSERS[name](), [text])

    def made_up_template(chance: random.Random) -> None:
        tried[:] = [test_texts.template_of(chance.getrandbits(32)).encode()]
        test_texts.bounded(tried[0].decode())

    found: dict[str, Callable[[random.Random], None]] = {
        "gguf": lambda c: test_files.survives(test_files.gguf_file(folder, damage(c, test_files.GGUF, 10_000))),
        "safetensors": lambda c: in_folder(
            "model.safetensors", damage(c, [(model / "model.safetensors").read_bytes()], 2000)
        ),
        "request": lambda c: test_requests.answered(c.choice(test_requests.PATHS), twisting(c, test_requests.SEEDS)),
        "bytes": lambda c: test_requests.answered(c.choice(test_requests.PATHS), damage(c, test_requests.SEEDS)),
        "template": lambda c: test_texts.bounded(damage(c, test_texts.TEMPLATES).decode("utf-8", "replace")),
        "made-up template": made_up_template,
        "parser": parse,
    }
    for name in test_files.JSON_FILES:
        seeds = [(model / name).read_bytes()]
        found[name] = lambda c, name=name, seeds=seeds: in_folder(  # type: ignore[misc]
            name, twisting(c, seeds) if c.random() < 0.7 else damage(c, seeds)
        )
    return found


def main() -> int:
    """The number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default=None, help="a target's name")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    logging.disable()
    chance, tried = random.Random(options.seed), [b""]
    runs: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        aims = {k: v for k, v in targets(Path(folder), tried).items() if options.only in (None, k)}
        while time.monotonic() < end:
            name = chance.choice(list(aims))
            runs[name] += 1
            start = time.process_time()
            try:
                aims[name](chance)
            except BaseException as error:  # a panic in Rust is no Exception
                if isinstance(error, KeyboardInterrupt):
                    break
                failures[name] += 1
                options.out.mkdir(exist_ok=True)
                place = options.out / f"{name}-{failures[name]}"
                place.write_bytes(tried[0])
                Path(f"{place}.txt").write_text(traceback.format_exc())
            slowest[name] = max(slowest.get(name, 0.0), time.process_time() - start)
    for name, count in sorted(runs.items()):
        print(f"{name:20} {count:7} runs, {failures[name]} failed, slowest {slowest[name]:.2f} s of CPU")
    return failures.total()


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
