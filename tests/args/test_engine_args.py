"""Flags and keyword arguments become configs, and nothing is dropped."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.args.engine_args import (
    add_engine_arguments,
    add_server_arguments,
    engine_config_from_kwargs,
    engine_config_from_namespace,
    parse_size,
    parse_tokens,
    server_config_from_namespace,
)
from octavo.config import EngineConfig, ServerConfig
from octavo.exceptions import ConfigError


def parse(*argv: str, positional_model: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_arguments(parser, positional_model=positional_model)
    add_server_arguments(parser)
    return parser.parse_args(list(argv))


def test_no_flags_give_the_dataclass_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    namespace = parse()
    assert engine_config_from_namespace(namespace) == EngineConfig()
    assert server_config_from_namespace(namespace) == ServerConfig()


def test_every_flag_of_the_serve_command_arrives() -> None:
    flags = """
        some/model.gguf --port 0 --host ::1 --max-model-len 4k --max-num-seqs 8 --max-num-batched-tokens 512
        --block-size 32 --kv-cache-memory 2GiB --no-enable-prefix-caching --no-enable-chunked-prefill
        --dtype float32 --threads 3 --served-model-name tiny --api-key k --seed 7 --shutdown-timeout 1.5
    """
    namespace = parse(*flags.split())
    engine, server = engine_config_from_namespace(namespace), server_config_from_namespace(namespace)
    assert (engine.model.model, engine.model.max_model_len, engine.model.dtype) == ("some/model.gguf", 4096, "float32")
    assert (engine.model.served_model_name, engine.model.seed) == ("tiny", 7)
    assert (engine.cache.block_size, engine.cache.kv_cache_memory) == (32, 2 << 30)
    assert not engine.cache.enable_prefix_caching
    assert not engine.scheduler.enable_chunked_prefill
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (8, 512)
    assert engine.backend.threads == 3
    assert (server.port, server.host, server.api_key, server.shutdown_timeout) == (0, "::1", ("k",), 1.5)


def test_the_model_is_a_flag_where_the_position_is_taken() -> None:
    assert engine_config_from_namespace(parse("--model", "m", positional_model=False)).model.model == "m"


def test_the_api_key_may_come_from_the_environment_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env another")
    assert server_config_from_namespace(parse()).api_key == ("from-env", "another")
    assert server_config_from_namespace(parse("--api-key", "flag", "--api-key", "[x")).api_key == ("flag", "[x")


@pytest.mark.parametrize("bad", [["--kv-cache-memory", "2 apples"], ["--max-num-seqs", "x"], ["--dtype", "int3"]])
def test_a_malformed_flag_is_an_argparse_error(bad: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError):
        parse(*bad)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2GiB", 2 << 30),
        ("512M", 512 << 20),
        ("1e9", 10**9),
        ("1.5g", 3 << 29),
        ("2GB", 2 * 10**9),
        ("7", 7),
        ("1KiB", 1024),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("32768", 32768), ("4k", 4096), ("32K", 32768), ("0.5k", 512), ("1m", 1 << 20)]
)
def test_token_counts(text: str, value: int) -> None:
    assert parse_tokens(text) == value


@given(st.one_of(st.text(max_size=12), st.from_regex(r"[0-9]{1,3}(e[0-9]{1,4})?[kmgt]?i?b?", fullmatch=True)))
def test_any_text_is_a_number_or_a_config_error(text: str) -> None:
    for parse_one in (parse_size, parse_tokens):
        with contextlib.suppress(ConfigError):
            assert parse_one(text) >= 0


def test_an_unknown_keyword_names_the_close_ones() -> None:
    with pytest.raises(ConfigError, match=r"max_model_length.*did you mean max_model_len"):
        engine_config_from_kwargs(max_model_length=5)


def test_keywords_take_sizes_as_text_and_refuse_wrong_types() -> None:
    config = engine_config_from_kwargs(model="m", kv_cache_memory="1GiB", max_model_len="2k", seed=3)
    assert (config.cache.kv_cache_memory, config.model.max_model_len, config.model.seed) == (1 << 30, 2048, 3)
    for wrong in ({"max_num_seqs": "8"}, {"seed": True}, {"enable_prefix_caching": 1}, {"dtype": "int3"}, {"model": 5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            engine_config_from_kwargs(**wrong)


@pytest.mark.parametrize("auto", ["auto", "-1", "AUTO"])
def test_the_context_may_be_left_to_the_engine(auto: str) -> None:
    assert engine_config_from_namespace(parse("--max-model-len", auto)).model.max_model_len is None
    assert engine_config_from_kwargs(max_model_len=auto).model.max_model_len is None
    assert engine_config_from_kwargs(max_model_len=-1).model.max_model_len is None
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        engine_config_from_kwargs(max_num_batched_tokens=-1)


def test_a_value_out_of_range_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        engine_config_from_kwargs(max_num_seqs=64, max_num_batched_tokens=32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"kv_cache_memory": "1e30"},
        {"max_model_len": "9999999999k"},
        {"max_num_batched_tokens": 2**31},
        {"long_prefill_token_threshold": 2**31},
        {"max_num_seqs": 2**40},
    ],
)
def test_numbers_beyond_any_machine(wrong: dict[str, Any]) -> None:
    """They would not even travel to the core process."""
    with pytest.raises(ConfigError):
        engine_config_from_kwargs(**wrong)


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "1e7"])
def test_shutdown_timeout_has_bounds(seconds: str) -> None:
    with pytest.raises(ConfigError, match="shutdown_timeout"):
        ServerConfig(shutdown_timeout=float(seconds))


@pytest.mark.parametrize("key", ["", " ", "a b", "k\n", "schlüssel"])
def test_an_api_key_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        ServerConfig(api_key=(key,))
    assert "schl" not in str(caught.value)  # a secret is not printed


def test_code_that_comes_with_a_model_is_never_run() -> None:
    with pytest.raises(argparse.ArgumentError, match="no code that comes with a model"):
        parse("--trust-remote-code")
    with pytest.raises(ConfigError, match="no code that comes with a model"):
        engine_config_from_kwargs(trust_remote_code=True)
    assert engine_config_from_kwargs(trust_remote_code=False) == EngineConfig()


@pytest.mark.parametrize(
    ("flags", "origins"),
    [
        (["--allowed-origins", '["https://a", "https://b"]'], ("https://a", "https://b")),
        (["--allowed-origins", "https://a", "--allowed-origins", "https://b"], ("https://a", "https://b")),
        (["--allowed-origins", "*"], ("*",)),
        ([], ()),
    ],
)
def test_lists_come_as_json_or_one_by_one(flags: list[str], origins: tuple[str, ...]) -> None:
    assert server_config_from_namespace(parse(*flags)).allowed_origins == origins
