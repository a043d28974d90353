"""What an engine's blocks are, while the files of its weights cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.engine.conftest import Eventually
from tests.service.connectors.engine_core.tieredvllmhost import TOKENS, MakeHost
from tests.service.connectors.engine_core.vllmhost import FakeRequest

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow_service.connectors.engine_core.tieridentity import TierIdentity

POOL = PoolIdentity(slot_bytes=(64,), regions=(), kv_cache_dtype="auto", groups=())
NAMESPACE = NamespaceIdentity("model", "v1", "configured", "probe")


class Files:
    """The weights' files, on a file system that gives errors while it `fails`."""

    def __init__(self) -> None:
        self.fails = True
        self.threads: list[str] = []

    def weights(self) -> FleetWeights:
        self._read()
        return FleetWeights("digest 1")

    def namespace(self) -> NamespaceIdentity:
        self._read()
        return NAMESPACE

    def _read(self) -> None:
        self.threads.append(threading.current_thread().name)
        if self.fails:
            raise OSError("stale file handle")


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def make_identity(files: Files) -> Iterator[Callable[[], TierIdentity]]:
    made: list[TierIdentity] = []

    def make() -> TierIdentity:
        made.append(TierIdentity(POOL, files.weights, files.namespace, first_pause=0.001))
        return made[-1]

    yield make
    for identity in made:
        identity.close()
        if identity._thread is not None:
            identity._thread.join()


MakeIdentity = Callable[[], TierIdentity]


def test_files_that_can_be_read_again_switch_the_tier_on(
    make: MakeHost, make_identity: MakeIdentity, files: Files, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    host = make(identity=make_identity())
    for number in range(3):
        assert host.look_up(FakeRequest(f"early {number}", TOKENS)) == 0
    status = host.tier.fleet.status()
    assert (status.state, status.reason.partition(":")[0]) == ("off", "weights_unreadable")
    assert "stale file handle" in status.reason
    assert caplog.text.count("the fleet tier is off") == 1
    files.fails = False

    def is_on() -> bool:
        host.look_up(FakeRequest("r", TOKENS))
        return host.tier.fleet.status().state == "on"

    eventually(is_on)
    assert set(files.threads[2:]) == {"kvstow-tier-identity"}, "no step waits for a file system but the first request's"


def test_weights_that_were_read_at_the_start_are_read_once(make_identity: MakeIdentity, files: Files) -> None:
    files.fails = False
    identity = make_identity()
    assert identity.fingerprint().value == identity.fingerprint().value is not None
    assert identity.is_final
    assert len(files.threads) == 2
    assert identity._thread is None


def test_an_operator_cannot_name_weights_before_the_model_is_known(make_identity: MakeIdentity, files: Files) -> None:
    identity = make_identity()
    identity.fingerprint()
    found = identity.named("v2")
    assert found.value is None
    assert found.reason.startswith("weights_unreadable")


def test_weights_that_an_operator_has_named_keep_that_name(
    make: MakeHost, make_identity: MakeIdentity, files: Files, eventually: Eventually
) -> None:
    identity = make_identity()
    host = make(identity=identity)
    assert host.look_up(FakeRequest("early", TOKENS)) == 0
    host.tier.fleet.name_weights("named")
    host.step_tier()
    files.fails = False
    eventually(lambda: identity.is_final)
    host.look_up(FakeRequest("r", TOKENS))
    assert host.tier.fleet.fingerprint == "named"


def test_an_engine_that_was_reset_meanwhile_stays_unnamed(
    make: MakeHost, make_identity: MakeIdentity, files: Files, eventually: Eventually
) -> None:
    """The files are those of the weights from before."""
    identity = make_identity()
    host = make(identity=identity)
    assert host.look_up(FakeRequest("early", TOKENS)) == 0
    assert host.side.reset()
    files.fails = False
    eventually(lambda: identity.is_final)
    assert host.look_up(FakeRequest("r", TOKENS)) == 0
    assert host.tier.fleet.fingerprint is None


def test_nothing_is_read_after_the_end(make_identity: MakeIdentity, files: Files) -> None:
    identity = make_identity()
    identity.fingerprint()
    identity.close()
    assert identity._thread is not None
    identity._thread.join(60)
    assert not identity._thread.is_alive()
