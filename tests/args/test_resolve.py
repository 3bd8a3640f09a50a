"""The user's MODEL becomes a local path; the name in the API stays the one the user gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.exceptions import ModelNotFound


def test_a_local_file_keeps_its_path_and_names_the_model(smollm2_path: str) -> None:
    config = resolve_engine_config(engine_config_from_kwargs(model=smollm2_path, threads=2), None)
    assert (config.model.model, config.model.served_model_name, config.backend.threads) == (
        smollm2_path,
        smollm2_path,
        2,
    )
    assert resolve_engine_config(config, None) == config


def test_the_catalogue_name_is_the_served_name(smollm2_path: str) -> None:
    config = resolve_engine_config(engine_config_from_kwargs(model="smollm2-135m"), None)
    assert config.model.served_model_name == "smollm2-135m"
    assert config.model.model == smollm2_path
    assert config.backend.threads is not None
    assert config.backend.threads >= 1


def test_an_explicit_served_name_wins(smollm2_path: str) -> None:
    config = engine_config_from_kwargs(model=smollm2_path, served_model_name="tiny")
    assert resolve_engine_config(config, None).model.served_model_name == "tiny"


def test_a_model_that_is_nowhere_is_named(tmp_path: object) -> None:
    missing = f"{tmp_path}/nothing.gguf"
    with pytest.raises(ModelNotFound, match=r"nothing\.gguf"):
        resolve_engine_config(engine_config_from_kwargs(model=missing), None)


def test_packed_weights_lie_beside_the_models_unless_told_otherwise(smollm2_path: str, tmp_path: Path) -> None:
    def folder(**settings: Any) -> str | None:
        config = resolve_engine_config(engine_config_from_kwargs(model=smollm2_path, **settings), None)
        assert resolve_engine_config(config, None) == config
        return config.backend.weights_cache_dir

    assert folder(cache_dir=str(tmp_path)) == str(tmp_path / "packed")
    assert folder(cache_dir=str(tmp_path), weights_cache_dir="elsewhere") == "elsewhere"
    assert folder(weights_cache=False) is None
    assert folder(weights_cache=False, weights_cache_dir="elsewhere") is None
