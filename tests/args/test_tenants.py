"""The file of --tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.args.tenants import read_tenants
from octavo.exceptions import ConfigError


def written(folder: Path, text: str) -> str:
    path = folder / "tenants.toml"
    path.write_text(text)
    return str(path)


def test_listed_tenants_and_the_default(tmp_path: Path) -> None:
    table = read_tenants(
        written(
            tmp_path,
            """
            [default]
            tokens_per_minute = 20_000
            [tenants.acme]
            weight = 4
            max_running = 8
            max_queued = 100
            max_tokens = 2048
            priority = [-1, 5]
            [tenants."key-12.3_4"]
            weight = 0.5
            """,
        )
    )
    acme = table.limits_of("acme")
    assert (acme.weight, acme.max_running, acme.max_queued, acme.max_tokens) == (4, 8, 100, 2048)
    assert (acme.priority, acme.tokens_per_minute) == ((-1, 5), None)
    assert table.limits_of("key-12.3_4").weight == 0.5
    assert table.limits_of("somebody").tokens_per_minute == 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight =", "not TOML"),
        ("[tenant.a]", "unknown 'tenant'"),
        ("tenants = 3", "tenants is no table"),
        ("[tenants]\na = 1", r"tenants\.a is no table"),
        ("[tenants.a]\nwieght = 2", r"tenants\.a\.wieght is unknown; did you mean weight"),
        ("[tenants.a]\nweight = true", r"tenants\.a\.weight = 'True': must be of type float"),
        ("[tenants.a]\nweight = 0", r"tenants\.a\.weight = 0: must be 0.001\.\.1e6"),
        ("[tenants.a]\nweight = nan", r"tenants\.a\.weight = nan"),
        ("[tenants.a]\nmax_running = 0", r"tenants\.a\.max_running = 0: must be 1\.\."),
        ("[tenants.a]\nmax_queued = 1.5", r"max_queued = '1.5': must be of type int"),
        ("[default]\npriority = [3, 1]", r"default\.priority = \(3, 1\): must be two numbers, lower first"),
        ("[default]\npriority = [3]", "two whole numbers"),
        ('[tenants."a b"]', "the name 'a b' must be"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_tenants(written(tmp_path, text))
    assert "tenants.toml" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_tenants(str(tmp_path / "none.toml"))
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        read_tenants(str(tmp_path / "odd"))
