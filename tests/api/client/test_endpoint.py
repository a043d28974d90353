from __future__ import annotations

from pathlib import Path

import pytest

from kvstow.errors import ConfigError
from kvstow_api.client import Endpoint


def test_addresses_are_read() -> None:
    assert Endpoint.parse("http://127.0.0.1:9595/").url == "http://127.0.0.1:9595"
    assert Endpoint.parse("https://[::1]:1").url == "https://[::1]:1"
    for text in ("unix:/run/a.sock", "unix:///run/a.sock"):
        assert Endpoint.parse(text).uds == Path("/run/a.sock")


@pytest.mark.parametrize(
    "server",
    [
        "",
        "localhost",
        "localhost:9595",
        "ftp://a",
        "http://",
        "http://a:0",
        "http://a:70000",
        "http://a/b",
        "http://u@a",
        "http://a?b=c",
        "unix:",
        "unix:run/a.sock",
    ],
)
def test_a_bad_address_is_refused_naming_what_is_allowed(server: str) -> None:
    with pytest.raises(ConfigError, match="allowed: http://HOST:PORT"):
        Endpoint.parse(server)


def test_a_token_file_is_read_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "token"
    endpoint = Endpoint.parse("http://a", token_file=path)
    with pytest.raises(ConfigError, match="token_file"):
        endpoint.credentials()
    path.write_text("one\n")
    assert endpoint.credentials() == {"Authorization": "Bearer one"}
    path.write_text("two\none\n")
    assert endpoint.credentials() == {"Authorization": "Bearer two"}
    path.write_text("")
    assert endpoint.credentials() == {}


def test_one_source_of_tokens_is_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with a token"):
        Endpoint.parse("http://a", token="t", token_file=tmp_path)


def test_an_endpoint_does_not_show_its_token() -> None:
    assert "s3cret" not in repr(Endpoint.parse("http://a", token="s3cret"))
