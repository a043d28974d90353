from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstow.errors import ConfigError, SettingError, TierUnavailableError
from kvstow_api.hostsettings import MAX_FILE_BYTES
from kvstow_service.tiers.redisstore import RedisLocation


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


OPTIONS = ("password_file", "ca_file", "certificate_file", "key_file")


def location(tmp_path: Path) -> RedisLocation:
    for option in OPTIONS:
        (tmp_path / option).write_text("content")
    return RedisLocation.parse("rediss://cache:6379?" + "&".join(f"{one}={tmp_path / one}" for one in OPTIONS))


def big(path: Path) -> None:
    path.write_bytes(bytes(MAX_FILE_BYTES + 1))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (big, f"larger than {MAX_FILE_BYTES} bytes"),
        (lambda path: None, "No such file or directory"),
    ],
    ids=["pipe", "device", "folder", "too large", "absent"],
)
def test_a_file_that_is_not_regular_or_too_large_is_refused_at_the_start(
    tmp_path: Path, make: Callable[[Path], object], why: str, option: str
) -> None:
    where = location(tmp_path)
    where.check_files()
    (tmp_path / option).unlink()
    make(tmp_path / option)
    with pytest.raises(SettingError, match=f"tier option {option} .*{option} cannot be read: {why}"):
        where.check_files()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_is_read_again_for_each_connection(tmp_path: Path, option: str) -> None:
    where = location(tmp_path)
    assert where.content(option) == b"content"
    (tmp_path / option).write_text("rotated")
    assert where.content(option) == b"rotated"
    (tmp_path / option).unlink()
    with pytest.raises(TierUnavailableError, match=f"{option} cannot be read: No such file") as failed:
        where.content(option)
    assert str(tmp_path) not in str(failed.value), "every reader of the admin API sees it"
