"""Over Debian's redis-server: plain, and with TLS and an access list."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tests.engine.tier.storecontract import SLOT, TIMEOUT, Slots, StoreContract
from tests.service.conftest import Eventually
from tests.service.tiers.redisserver import Server

from kvstow.errors import TierTimeoutError, TierUnavailableError
from kvstow.keys import make_key
from kvstow.tier.store import ObjectName, SlotObject, TierStore
from kvstow_api.hostsettings import MAX_FILE_BYTES
from kvstow_service.tiers import redisstore
from kvstow_service.tiers.redisstore import RedisLocation, RedisStore, RedisTransfers

if TYPE_CHECKING:
    import redis

pytestmark = [
    pytest.mark.tier,
    pytest.mark.skipif(
        find_spec("redis") is None or shutil.which("redis-server") is None,
        reason="redis-py or redis-server is not installed: make test-tier",
    ),
]

SHORT = 1.0
PASSWORD = "correct horse"

ACCESS_LIST = f"""
user default off
user kvstow on >{PASSWORD.replace(" ", "_")} ~kvs1:* +set +get +exists +unlink
user reader on >{PASSWORD.replace(" ", "_")} ~kvs1:* +get +exists
"""


class TestRedisStore(StoreContract):
    @pytest.fixture
    def tier(self, serve: Callable[..., Server]) -> TierStore:
        return RedisStore(RedisLocation("127.0.0.1", serve().port))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(PASSWORD.replace(" ", "_"))
    return path


@pytest.fixture
def tls_folder(tmp_path: Path) -> Path:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    return tmp_path


class TestRedisStoreWithTls(StoreContract):
    @pytest.fixture
    def tier(self, serve: Callable[..., Server], tls_folder: Path, secret: Path) -> TierStore:
        users = tls_folder / "users.acl"
        users.write_text(ACCESS_LIST.strip() + "\n")
        port = serve("--aclfile", str(users), tls_folder=tls_folder).port
        return RedisStore(RedisLocation("127.0.0.1", port, "kvstow", secret, True, tls_folder / "ca.pem"))


def name(number: int) -> ObjectName:
    return ObjectName("f", make_key(0, number.to_bytes(32, "big")), 0, 1)


@pytest.fixture
def slots() -> Iterator[Slots]:
    slots = Slots()
    yield slots
    slots.close()


@pytest.fixture
def opened(slots: Slots) -> Iterator[Callable[..., RedisTransfers]]:
    clients: list[RedisTransfers] = []

    def open_transfers(server: Server, user: str | None = None, secret: Path | None = None) -> RedisTransfers:
        clients.append(RedisStore(RedisLocation("127.0.0.1", server.port, user, secret)).open_transfers())
        clients[-1].add_memory(slots.range)
        return clients[-1]

    yield open_transfers
    for client in clients:
        client.close()


def objects(slots: Slots, *numbers: int, first: int = 0) -> list[SlotObject]:
    return [slots.object(name(number), first + number) for number in numbers]


def raw(server: Server) -> redis.Redis:
    import redis

    return redis.Redis("127.0.0.1", server.port)


@pytest.mark.parametrize("way", ["slot", "header", "other", "short", "long"])
def test_an_object_with_other_bytes_is_never_found(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots, way: str
) -> None:
    server = serve()
    client = opened(server)
    assert client.put(objects(slots, 1, 2, 3), TIMEOUT) == ["stored"] * 3
    with raw(server) as store:
        data = bytearray(store.get(str(name(3 if way == "other" else 2))) or b"")
        if way == "slot":
            data[-1] ^= 1
        elif way == "header":
            data[0] ^= 1
        elif way == "short":
            del data[-1:]
        elif way == "long":
            data += b"x"
        store.set(str(name(2)), bytes(data))
        slots.fill(66, 0xEE)
        assert client.get(objects(slots, 1, 2, 3, first=64), TIMEOUT) == ["found", "corrupt", "found"]
        assert slots.read(66) == b"\xee" * SLOT
        assert not store.exists(str(name(2)))  # it does not stay
    assert client.put(objects(slots, 2), TIMEOUT) == ["stored"]
    assert client.get(objects(slots, 2, first=64), TIMEOUT) == ["found"]


def test_a_store_without_room(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots
) -> None:
    client = opened(serve("--maxmemory", "3mb", "--maxmemory-policy", "noeviction"))
    numbers = range(64)
    puts = [slots.object(name(number), 0, 64 * SLOT) for number in numbers]
    statuses = client.put(puts, TIMEOUT)
    assert set(statuses) == {"stored", "full"}
    gets = [slots.object(name(number), 64, 64 * SLOT) for number in numbers]
    assert client.get(gets, TIMEOUT) == ["found" if status == "stored" else "missing" for status in statuses]


def test_nobody_waits_for_a_connection_that_the_first_call_makes(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots
) -> None:
    server = serve()
    client = opened(server)
    assert client.health().state == "connected"
    server.close()
    with pytest.raises(TierUnavailableError):
        client.put(objects(slots, 1), TIMEOUT)
    assert client.health().state == "connecting"


def test_a_server_that_hangs_and_comes_back(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots
) -> None:
    server = serve()
    client = opened(server)
    assert client.put(objects(slots, 1), TIMEOUT) == ["stored"]
    assert client.get(objects(slots, 1, first=64), TIMEOUT) == ["found"]
    server.stop()
    slots.fill(65, 0xEE)
    with pytest.raises(TierTimeoutError):
        client.get(objects(slots, 1, first=64), SHORT)
    with pytest.raises(TierTimeoutError):
        client.put(objects(slots, 2), SHORT)
    assert client.health().state == "connecting"
    assert "did not answer" in client.health().reason
    server.process.send_signal(signal.SIGCONT)
    assert client.put(objects(slots, 3), TIMEOUT) == ["stored"]
    assert slots.read(65) == b"\xee" * SLOT  # nothing came late
    assert client.get(objects(slots, 1, 3, first=64), TIMEOUT) == ["found", "found"]
    assert (client.stats().timeouts, client.stats().restarts) == (2, 2)


def test_a_server_that_is_killed(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots
) -> None:
    server = serve()
    client = opened(server)
    assert client.put(objects(slots, 1), TIMEOUT) == ["stored"]
    server.close()
    for call in (client.put, client.get):
        with pytest.raises(TierUnavailableError):
            call(objects(slots, 1), TIMEOUT)
    assert client.health().state == "connecting"


def test_closing_ends_a_call_that_hangs(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots, eventually: Eventually
) -> None:
    server = serve()
    client = opened(server)
    assert client.get(objects(slots, 1), TIMEOUT) == ["missing"]
    server.stop()
    errors: list[Exception] = []

    def get() -> None:
        try:
            client.get(objects(slots, 1), 10 * TIMEOUT)
        except TierUnavailableError as error:
            errors.append(error)

    thread = Thread(target=get)
    thread.start()
    eventually(client._gets._lock.locked, "the call")
    client.close()
    thread.join(TIMEOUT)
    assert len(errors) == 1


def test_a_lookup_does_not_pay_for_the_wait_for_another_one(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookups of all namespaces share a connection. A call that has its turn late is no outage."""
    now = [0.0]

    class Turn:
        def __enter__(self) -> None:
            now[0] += 10 * TIMEOUT  # so long does the call of another namespace take

        def __exit__(self, *_: object) -> None: ...

    lookups = RedisStore(RedisLocation("127.0.0.1", serve().port)).open_lookups()
    try:
        monkeypatch.setattr(redisstore, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(lookups._exists, "_lock", Turn())
        assert lookups.exists([name(1)], TIMEOUT) == [False]
        assert (lookups.health().state, lookups.stats().timeouts) == ("connected", 0)
    finally:
        lookups.close()


def test_an_access_list_decides(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots, secret: Path, tmp_path: Path
) -> None:
    users = tmp_path / "users.acl"
    users.write_text(ACCESS_LIST.strip() + "\n")
    server = serve("--aclfile", str(users))
    assert opened(server, "kvstow", secret).put(objects(slots, 1), TIMEOUT) == ["stored"]
    reader = opened(server, "reader", secret)
    assert reader.get(objects(slots, 1, first=64), TIMEOUT) == ["found"]
    with pytest.raises(TierUnavailableError, match="permissions"):
        reader.put(objects(slots, 2), TIMEOUT)
    for client in (opened(server), opened(server, "stranger", secret)):
        with pytest.raises(TierUnavailableError):
            client.get(objects(slots, 1, first=64), TIMEOUT)


@pytest.mark.parametrize("kind", ["list", "set", "hash", "zset", "stream"])
def test_a_key_of_another_type_is_removed_like_other_garbage(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots, kind: str
) -> None:
    server = serve()
    client = opened(server)
    assert client.put(objects(slots, 1, 3), TIMEOUT) == ["stored"] * 2
    key = str(name(2))
    commands: dict[str, tuple[str, ...]] = {
        "list": ("RPUSH", key, "x"),
        "set": ("SADD", key, "x"),
        "hash": ("HSET", key, "x", "y"),
        "zset": ("ZADD", key, "1", "x"),
        "stream": ("XADD", key, "*", "x", "y"),
    }
    with raw(server) as store:
        store.execute_command(*commands[kind])
        assert client.get(objects(slots, 2, first=64), TIMEOUT) == ["corrupt"], "alone, it is no outage"
        store.execute_command(*commands[kind])
        assert client.get(objects(slots, 1, 2, 3, first=64), TIMEOUT) == ["found", "corrupt", "found"]
        assert not store.exists(key)
    assert client.put(objects(slots, 2), TIMEOUT) == ["stored"]
    assert client.get(objects(slots, 2, first=64), TIMEOUT) == ["found"]


def test_a_rotated_password_is_used_for_the_next_connection(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots, secret: Path
) -> None:
    import redis

    server = serve("--requirepass", "first")
    secret.write_text("first\n")
    client = opened(server, None, secret)
    assert client.put(objects(slots, 1), TIMEOUT) == ["stored"]
    with redis.Redis("127.0.0.1", server.port, password="first") as admin:
        admin.config_set("requirepass", "second")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for _ in range(2):  # the first one finds that the connection has ended
        with pytest.raises(TierUnavailableError):
            client.put(objects(slots, 2), TIMEOUT)
    secret.write_text("second\n")
    assert client.put(objects(slots, 2), TIMEOUT) == ["stored"]


def test_a_file_of_a_secret_that_has_become_something_else_is_not_read(
    serve: Callable[..., Server], opened: Callable[..., RedisTransfers], slots: Slots, secret: Path
) -> None:
    """A pipe would keep the call for good, and a device fill the memory. Readers of the reason learn no path."""
    client = opened(serve("--requirepass", secret.read_text()), None, secret)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: os.mkfifo(secret), "password_file cannot be read: not a regular file"),
        (lambda: secret.symlink_to("/dev/zero"), "password_file cannot be read: not a regular file"),
        (lambda: secret.write_bytes(bytes(MAX_FILE_BYTES + 1)), "password_file cannot be read: larger than"),
        (lambda: secret.write_bytes(b"\xff"), "password_file is not text"),
        (lambda: None, "password_file cannot be read: No such file"),
    ]
    for make, reason in wrong:
        secret.unlink(missing_ok=True)
        make()
        with pytest.raises(TierUnavailableError, match=reason):
            client.get(objects(slots, 1), TIMEOUT)
        assert str(secret) not in client.health().reason


def test_an_encrypted_key_is_refused_and_nobody_asked_for_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def load(context: object, certfile: object, keyfile: object, password: object) -> None:
        given.append(password)
        raise ssl.SSLError("bad decrypt")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load)
    file = tmp_path / "file"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        where = RedisLocation("127.0.0.1", port, is_tls=True, certificate_file=file, key_file=file)
        lookups = RedisStore(where).open_lookups()
        with pytest.raises(TierUnavailableError, match="bad decrypt"):
            lookups.exists([name(1)], TIMEOUT)
        lookups.close()
    assert given == [""], "None would prompt on the terminal"


def test_a_server_without_tls_is_not_trusted(
    serve: Callable[..., Server], tls_folder: Path, tmp_path_factory: pytest.TempPathFactory, slots: Slots
) -> None:
    """Nor is one whose certificate another authority has signed."""
    import trustme

    other = tmp_path_factory.mktemp("other") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(other)
    for server in (serve(), serve(tls_folder=tls_folder)):
        lookups = RedisStore(RedisLocation("127.0.0.1", server.port, is_tls=True, ca_file=other)).open_lookups()
        with pytest.raises(TierUnavailableError):
            lookups.exists([name(1)], 5 * SHORT)  # a server without TLS waits for more of a command
        lookups.close()
