from __future__ import annotations

import pytest

from kvstow.errors import ConfigError
from kvstow_service.tiers.capacity import capacity_share
from kvstow_service.tiers.mooncake.location import MooncakeLocation
from kvstow_service.tiers.redislocation import RedisLocation


def test_nodes_share_the_store() -> None:
    assert capacity_share({}) is None
    assert capacity_share({"capacity": "64GiB"}) == 64 << 30
    assert capacity_share({"capacity": "64GiB", "nodes": "4"}) == 16 << 30


def test_every_url_takes_a_capacity() -> None:
    options = "capacity=64GiB&nodes=4"
    assert MooncakeLocation.parse(f"mooncake://a:1?{options}").capacity == 16 << 30
    assert MooncakeLocation.parse(f"mooncake://a:1?{options}&replicas=2").capacity == 8 << 30
    assert MooncakeLocation.parse("mooncake://a:1").capacity is None
    assert RedisLocation.parse(f"redis://a:1?{options}").capacity == 16 << 30
    assert RedisLocation.parse("redis://a:1").capacity is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("capacity=much", "tier option capacity is 'much'; allowed: a number of bytes"),
        ("capacity=0", "tier option capacity is '0'; allowed: more than 0 bytes"),
        ("nodes=4", "tier option nodes is '4'; allowed: together with capacity"),
        ("capacity=1GiB&nodes=0", "tier option nodes is '0'; allowed: a whole number from 1"),
        ("capacity=1GiB&nodes=-1", "tier option nodes is '-1'"),
        ("capacity=1GiB&capacity=2GiB", "tier option capacity is '2GiB'; allowed: each option once"),
    ],
)
def test_a_wrong_capacity_is_refused(options: str, said: str) -> None:
    for url in (f"mooncake://a:1?{options}", f"redis://a:1?{options}"):
        with pytest.raises(ConfigError, match=said):
            (MooncakeLocation if url.startswith("mooncake") else RedisLocation).parse(url)
