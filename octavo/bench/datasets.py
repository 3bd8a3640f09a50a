"""Workloads, equal for equal seeds: what is asked and how long the answers are to be.

Prompts are token ids, so that every engine gets the same work whatever its tokenizer; servers that take text only get
words instead (:func:`as_text`). Knows nothing of engines or HTTP.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from octavo.exceptions import ConfigError

LOWEST_ID = 1000  # the ids below are bytes and special tokens in most vocabularies
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
         "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
         "question", "work", "night", "point", "home", "water", "room")  # fmt: skip


@dataclass(frozen=True)
class BenchRequest:
    """One request: the prompt's token ids and the number of tokens to generate."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class DatasetConfig:
    """What to draw. Lengths in tokens; ``vocab_size`` bounds the ids, which start at 1,000.

    random: lengths uniform in [len * (1 - range_ratio), len * (1 + range_ratio)].
    sharegpt-like: log-normal lengths, prompts with median 60 and sigma 1.2, answers with median 180 and sigma 0.9,
    both cut to [4, 1024]: many short questions, a long tail, answers longer than questions, as in chats.
    prefix-repetition: ``num_prefixes`` prefixes of ``prefix_len`` tokens in turn, each request with its own suffix.
    """

    name: str = "random"
    num_prompts: int = 1000
    seed: int = 0
    vocab_size: int = 32_000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    prefix_output_len: int = 128


def make_dataset(config: DatasetConfig) -> list[BenchRequest]:
    """The requests, in the order in which they are sent. Raises ConfigError for a value out of range."""
    if config.vocab_size <= LOWEST_ID:
        raise ConfigError(f"vocab_size must be above {LOWEST_ID}, got {config.vocab_size}")
    if not 0 <= config.range_ratio < 1:
        raise ConfigError(f"range_ratio must be in [0, 1), got {config.range_ratio}")
    rng = random.Random(f"{config.name}/{config.seed}")
    draw = {"random": _random, "sharegpt-like": _sharegpt_like, "prefix-repetition": _prefix_repetition}
    if config.name not in draw:
        raise ConfigError(f"no dataset {config.name!r}; there are {', '.join(draw)}")
    return draw[config.name](config, rng)


def _ids(rng: random.Random, count: int, config: DatasetConfig) -> tuple[int, ...]:
    return tuple(rng.randrange(LOWEST_ID, config.vocab_size) for _ in range(count))


def _random(config: DatasetConfig, rng: random.Random) -> list[BenchRequest]:
    def length(mean: int) -> int:
        low, high = math.ceil(mean * (1 - config.range_ratio)), math.floor(mean * (1 + config.range_ratio))
        return max(1, rng.randint(low, high))

    requests = []
    for _ in range(config.num_prompts):
        input_len, output_len = length(config.input_len), length(config.output_len)
        requests.append(BenchRequest(_ids(rng, input_len, config), output_len))
    return requests


def _sharegpt_like(config: DatasetConfig, rng: random.Random) -> list[BenchRequest]:
    def length(median: int, sigma: float) -> int:
        return min(1024, max(4, round(rng.lognormvariate(math.log(median), sigma))))

    requests = []
    for _ in range(config.num_prompts):
        input_len, output_len = length(60, 1.2), length(180, 0.9)
        requests.append(BenchRequest(_ids(rng, input_len, config), output_len))
    return requests


def _prefix_repetition(config: DatasetConfig, rng: random.Random) -> list[BenchRequest]:
    prefixes = [_ids(rng, config.prefix_len, config) for _ in range(config.num_prefixes)]
    return [
        BenchRequest(prefixes[i % len(prefixes)] + _ids(rng, config.suffix_len, config), config.prefix_output_len)
        for i in range(config.num_prompts)
    ]


def as_text(prompt: tuple[int, ...]) -> str:
    """Common words, one for each id: about as many tokens as ids in the vocabularies of today."""
    return " ".join(WORDS[token % len(WORDS)] for token in prompt)
