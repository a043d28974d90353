from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvstow.errors import MissingPackageError
from kvstow_api.directory import TierMeasurements
from kvstow_service.stores.stores import measure_store, open_store, shown_url


def test_a_url_names_a_store() -> None:
    if find_spec("mooncake") is None:
        with pytest.raises(MissingPackageError, match=r"pip install '\.\[mooncake\]' in"):
            open_store("mooncake://127.0.0.1:50051")
    else:
        assert open_store("mooncake://127.0.0.1:50051").name == "mooncake"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mooncake://10.0.0.1:50051?protocol=rdma&replicas=2", "mooncake://10.0.0.1:50051?protocol=rdma&replicas=2"),
        ("mooncake://a:1,b:2?ha=etcd", "mooncake://a:1,b:2?ha=etcd"),
        ("mooncake://kvstow:secret@cache:6379", "mooncake://cache:6379"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_who_can_reach_a_store() -> None:
    public = measure_store("mooncake://8.8.8.8:50051?protocol=rdma")
    assert (public.public_addresses, public.pins_memory) == (("8.8.8.8",), True)
    for host in ("127.0.0.1", "10.1.2.3", "192.168.0.7", "[::1]", "[fd00::7]", "localhost"):
        found = measure_store(f"mooncake://{host}:50051")
        assert (found.public_addresses, found.pins_memory) == ((), False)
    assert measure_store(None) == TierMeasurements()
