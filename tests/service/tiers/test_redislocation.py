from __future__ import annotations

from pathlib import Path

import pytest

from kvstow.errors import ConfigError
from kvstow_service.tiers.redislocation import RedisLocation


def test_a_url_with_a_server() -> None:
    where = RedisLocation.parse("redis://10.0.0.1:6379")
    assert where == RedisLocation("10.0.0.1", 6379)
    assert where.password() is None
    assert str(where) == "redis://10.0.0.1:6379"


def test_a_url_with_everything(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("pass word\n")
    where = RedisLocation.parse(
        f"rediss://kv@[::1]:6380/?password_file={secret}&ca_file=/ca&certificate_file=/c&key_file=/k"
    )
    assert where == RedisLocation("::1", 6380, "kv", secret, True, Path("/ca"), Path("/c"), Path("/k"))
    assert where.password() == "pass word"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://a", "HOST:PORT"),
        ("redis://a:x", "HOST:PORT"),
        ("redis://:6379", "HOST:PORT"),
        ("redis://a:1/0", "HOST:PORT"),
        ("redis://a:1?colour=red", "colour is 'red'; allowed: only the options ca_file"),
        ("redis://a:1?ca_file=/ca", "with rediss://"),
        ("redis://a:1?password_file=", "the path of a file"),
        ("rediss://a:1?key_file=/k", "together"),
        ("redis://me@a:1", "password_file"),
    ],
)
def test_a_wrong_url_is_refused_with_the_part_that_is_wrong(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisLocation.parse(url)
    assert said in str(caught.value)


@pytest.mark.parametrize("url", ["redis://me:secret@a:1", "redis://:secret@a:1", "redis://me:secret@a:99999"])
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisLocation.parse(url)
    assert "secret" not in str(caught.value)
