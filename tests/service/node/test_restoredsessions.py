"""Sessions of the service before: what they hold is freed when their processes have ended or have reported it."""

from __future__ import annotations

import os
import signal
from typing import cast

import pytest
from msgspec.structs import replace
from tests.doubles.fakes import FakeClock
from tests.service.node.attach.test_sessionlife import quiet
from tests.service.node.conftest import WORKER, FakeProcess, MakeNode, Node, wait_until
from tests.service.node.fakehost import FakeSession

from kvstow.attach.hello import digest_of
from kvstow.attach.peer import Peer
from kvstow_service.node.pools.nodesession import NodeSession

TOKEN = "a token of the service before"


@pytest.fixture
def processes() -> list[FakeProcess]:
    return [FakeProcess(pid=101), FakeProcess(pid=102)]


@pytest.fixture
def node(make_node: MakeNode, processes: list[FakeProcess]) -> Node:
    """A restarted service, with one session of two workers from before."""
    node = make_node(start=False)
    node.processes += processes
    restore(node, *(process.peer() for process in processes))
    return node


def restore(node: Node, *peers: Peer) -> None:
    """A session with these workers; starts the server."""
    workers = [(replace(WORKER, rank=rank), peer) for rank, peer in enumerate(peers)]
    session = FakeSession(node.host, "before", digest_of(TOKEN), node.server.send, peers[0].uid, len(peers))
    node.host.sessions["before"] = session
    node.server.restore_session(cast(NodeSession, session), workers)
    node.server.start()


def ends(node: Node) -> list[tuple[object, ...]]:
    return node.events("lost", "ended", "over")


def test_other_processes_cannot_settle_it(node: Node) -> None:
    node.process()
    scheduler = node.attach()
    node.process(pid=999)
    node.attach_worker(scheduler, 0, settled_tokens=(TOKEN,))
    quiet(node)
    assert ends(node) == []


def test_a_worker_whose_pidfd_nobody_has_settles_it_by_its_token(make_node: MakeNode) -> None:
    node = make_node(start=False)
    restore(node, Peer(0, 1000, 1000, None))
    node.process()
    scheduler = node.attach()
    node.process(uid=1000)
    node.attach_worker(scheduler, 1, settled_tokens=(TOKEN,))
    quiet(node)
    assert ends(node) == [], "it is of another rank"
    node.attach_worker(scheduler, 0, settled_tokens=("another", TOKEN))
    node.wait_for_event("over")
    assert ends(node) == [("ended", "before", 0), ("over", "before")]


def test_a_process_whose_end_cannot_be_seen_is_trusted_only_if_that_was_asked_for(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    for trust_eof in (None, 30.0):
        node = make_node(start=False, clock=clock, trust_eof=trust_eof)
        restore(node, Peer(0, 1000, 1000, None))
        clock.advance(29)
        quiet(node)
        assert ends(node) == []
        clock.advance(2)
        quiet(node)
        assert len(ends(node)) == (0 if trust_eof is None else 2)
    assert "start the service with --trust-eof" in caplog.text


def test_detaching_it_never_kills_the_service_or_a_process_of_another_user(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever pidfd the records name for a worker."""
    killed: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, number: killed.append(pidfd))
    node = make_node(start=False)
    parent = Peer(0, os.geteuid() + 1, 0, os.pidfd_open(os.getppid()))
    restore(node, Peer(0, os.geteuid(), 0, os.pidfd_open(os.getpid())), parent)
    assert node.server.detach("before", kill=True)
    wait_until(lambda: caplog.text.count("was not killed") == 2)
    assert killed == []
    assert list(node.host.sessions) == ["before"], "it is freed when its processes have ended, and not before"
