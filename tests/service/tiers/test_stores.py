from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvstow.errors import ConfigError, MissingPackageError
from kvstow_service.tiers.stores import open_store


def test_a_url_names_a_store() -> None:
    if find_spec("mooncake") is None:
        with pytest.raises(MissingPackageError, match=r"pip install 'kvstow\[mooncake\]'"):
            open_store("mooncake://127.0.0.1:50051")
    else:
        assert open_store("mooncake://127.0.0.1:50051").name == "mooncake"


@pytest.mark.parametrize("url", ["", "mooncake", "http://a:1", "127.0.0.1:50051"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="mooncake://MASTER:PORT"):
        open_store(url)
