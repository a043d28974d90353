from __future__ import annotations

import pytest

from kvstow.errors import ConfigError
from kvstow_service.stores.mooncake.mooncakestore import MooncakeLocation


def test_a_url_with_a_master() -> None:
    where = MooncakeLocation.parse("mooncake://store.example:50051")
    assert where == MooncakeLocation(("store.example:50051",))
    assert where.master == "store.example:50051"
    assert str(where) == "mooncake://store.example:50051"


def test_a_url_with_options() -> None:
    where = MooncakeLocation.parse(
        "mooncake://10.0.0.1:1/?protocol=rdma&devices=mlx5_0,mlx5_1&host=10.0.0.7&replicas=2"
    )
    assert where == MooncakeLocation(("10.0.0.1:1",), False, "rdma", "mlx5_0,mlx5_1", "10.0.0.7", 2)
    assert where.local_host() == "10.0.0.7"


def test_etcd_names_the_master() -> None:
    where = MooncakeLocation.parse("mooncake://a:2379,b:2379?ha=etcd")
    assert where.master == "etcd://a:2379;b:2379"


def test_the_own_address_is_the_one_that_the_master_is_reached_from() -> None:
    assert MooncakeLocation.parse("mooncake://127.0.0.1:50051").local_host() == "127.0.0.1"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "MASTER:PORT"),
        ("a:1", "MASTER:PORT"),
        ("nfs://a:1", "MASTER:PORT"),
        ("mooncake://a", "MASTER:PORT"),
        ("mooncake://:5", "MASTER:PORT"),
        ("mooncake://a:0", "MASTER:PORT"),
        ("mooncake://a:65536", "MASTER:PORT"),
        ("mooncake://a:x", "MASTER:PORT"),
        ("mooncake://a:1/path", "MASTER:PORT"),
        ("mooncake://a:1#x", "MASTER:PORT"),
        ("mooncake://a:1?protocol", "MASTER:PORT"),
        ("mooncake://a:1,b:2", "one master"),
        (
            "mooncake://a:1?colour=red",
            "colour is 'red'; allowed: only the options devices, ha, host, protocol, replicas",
        ),
        ("mooncake://a:1?ha=etcd&ha=etcd", "each option once"),
        ("mooncake://a:1?ha=redis", "ha is 'redis'; allowed: none, etcd"),
        ("mooncake://a:1?protocol=udp", "protocol is 'udp'; allowed: tcp, rdma"),
        ("mooncake://a:1?devices=mlx5_0", "with protocol=rdma"),
        ("mooncake://a:1?replicas=0", "from 1 to 8"),
        ("mooncake://a:1?replicas=two", "from 1 to 8"),
    ],
)
def test_a_wrong_url_is_refused_with_the_part_that_is_wrong(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MooncakeLocation.parse(url)
    assert said in str(caught.value)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        MooncakeLocation.parse("mooncake://me:secret@a:1")
    assert "secret" not in str(caught.value)
