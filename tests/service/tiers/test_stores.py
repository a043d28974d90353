from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvstow.errors import ConfigError, MissingPackageError
from kvstow_service.tiers.hostedtiers import open_store


def test_a_url_names_a_store() -> None:
    if find_spec("mooncake") is None:
        with pytest.raises(MissingPackageError, match=r"pip install '\.\[mooncake\]' in"):
            open_store("mooncake://127.0.0.1:50051")
    else:
        assert open_store("mooncake://127.0.0.1:50051").name == "mooncake"


@pytest.mark.parametrize("url", ["", "mooncake", "http://a:1", "127.0.0.1:50051", "memory:", "memory:1GiB"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="mooncake://MASTER:PORT"):
        open_store(url)


def test_redis_with_and_without_tls() -> None:
    for url in ("redis://127.0.0.1:6379", "rediss://127.0.0.1:6379"):
        if find_spec("redis") is None:
            with pytest.raises(MissingPackageError, match=r"pip install '\.\[redis\]' in"):
                open_store(url)
        else:
            assert open_store(url).name == "redis"
