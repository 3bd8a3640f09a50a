"""Every wrong setting is refused in words: name, value, what it must be; models that are not there, with near names."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest

from octavo.args.engine_args import SECTIONS, _unwrap
from octavo.catalog import resolve_model
from octavo.cli.main import main
from octavo.config import ChatConfig, LogConfig, ServerConfig
from octavo.exceptions import ConfigError, ModelNotFound

CONFIGS = [*SECTIONS.values(), ServerConfig, ChatConfig, LogConfig]
FAR = {int: [-(10**30), 10**30], float: [-1e30, 1e30, math.inf, math.nan]}
SWEEP = [
    (config, field.name, value)
    for config in CONFIGS
    for field in dataclasses.fields(config)
    for value in FAR.get(_unwrap(get_type_hints(config)[field.name])[0], [])
]


@pytest.mark.parametrize(("config", "name", "value"), SWEEP)
def test_every_number_has_bounds_and_says_them(config: type, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert re.match(r"\w+ = .*: must be ", str(caught.value))
    assert name in str(caught.value)
    assert re.search(r"must be .*\d", str(caught.value))


def test_the_sweep_is_of_all_sections() -> None:
    assert len({config for config, _, _ in SWEEP}) >= 8
    assert len(SWEEP) > 60


CHOICES = [
    (config, field.name)
    for config in CONFIGS
    for field in dataclasses.fields(config)
    if get_origin(_unwrap(get_type_hints(config)[field.name])[0]) is not None
    and not isinstance(field.default, tuple)
    and field.metadata.get("json") is None
]


@pytest.mark.parametrize(("config", "name"), CHOICES)
def test_a_wrong_choice_shows_the_right_ones(
    config: type, name: str, capsys: pytest.CaptureFixture[str], smollm2_path: str
) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SystemExit) as ended:
        main(["serve", smollm2_path, flag, "nonsense"])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(word in told for word in (flag, "nonsense", "choose from"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smolm2-135m", "smollm2-135m"),
        ("SmolLM2-135M", "smollm2-135m"),
        ("qwen2.5-coder", "qwen2.5-coder-0.5b"),
        ("no-such-model-at-all", "catalogue: "),
        ("x" * 5000, "catalogue: "),
        ("a\0b", "catalogue: "),
        ("~nobody-here/x.gguf", "catalogue: "),
    ],
)
def test_a_model_that_is_not_there(name: str, near: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert near in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_that_is_misspelt(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"did you mean .*model-q4\.gguf"):
        resolve_model(str(tmp_path / "modle-q4.gguf"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too few for a GGUF header"),
        (b"# a text\n" * 9, "not a GGUF file"),
        (b"\x80\x04pickle" * 9, "not a GGUF file"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert main(["plan", str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("octavo plan: ")
    assert str(path) in told
    assert words in told
    assert told.count("\n") == 1
