"""What a session holds is freed when no process of it can reach memory: not when a connection ends, not by a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial

import pytest
from msgspec.structs import replace
from tests.doubles.fakes import FakeClock
from tests.service.node.conftest import (
    HELLO,
    WORKER,
    FakeProcess,
    MakeNode,
    Node,
    figures_of,
    next_push,
    refusal_by,
    wait_until,
)
from tests.service.node.fakehost import FakeSession

from kvstow.attach.calls import Detach, ExtentGrant, GrantedExtents, Lookup, ReleasedExtents
from kvstow.attach.connection import AttachConnection
from kvstow.attach.peer import Peer
from kvstow.errors import AttachRefusedError

GRANT = GrantedExtents(4096, (ExtentGrant(5, 0, 0, 4, 16384, 0),), True)


def give_memory(node: Node) -> None:
    """Every worker that joins gets an extent."""

    def grant(session: FakeSession, rank: int) -> None:
        file = os.memfd_create("extent")
        session.push(GRANT, rank=rank, fds=(file,))
        os.close(file)

    node.host.on_join = grant


def attach_engine(node: Node) -> tuple[AttachConnection, list[AttachConnection], list[FakeProcess]]:
    """A scheduler half and two workers that have mapped memory, each in a process of its own."""
    processes = [node.process()]
    scheduler = node.attach()
    workers = []
    for rank in range(2):
        processes.append(node.process(pid=100 + rank))
        workers.append(node.attach_worker(scheduler, rank))
        for fd in next_push(workers[-1]).fds:
            os.close(fd)
    return scheduler, workers, processes


def quiet(node: Node) -> None:
    """All that has happened so far is handled."""
    done = threading.Event()
    for _ in range(2):
        done.clear()
        node.server.post(done.set)
        assert done.wait(20)


def is_detached(connection: AttachConnection) -> bool:
    connection.poll(0.01)
    return connection.state == "detached"


def is_over(node: Node, number: int) -> bool:
    return len(node.events("over")) == number


def ends(node: Node) -> list[object]:
    return [event[0] if event[0] != "ended" else event[2] for event in node.events("lost", "ended", "over")]


@pytest.fixture
def engine(node: Node) -> tuple[AttachConnection, list[AttachConnection], list[FakeProcess]]:
    give_memory(node)
    return attach_engine(node)


Engine = tuple[AttachConnection, list[AttachConnection], list[FakeProcess]]


@pytest.mark.parametrize("first", ["scheduler", "worker 0", "worker 1"])
def test_the_end_of_any_connection_loses_the_session_and_frees_nothing(node: Node, engine: Engine, first: str) -> None:
    scheduler, workers, processes = engine
    (scheduler if first == "scheduler" else workers[int(first[-1])]).close()
    node.wait_for_event("lost")
    quiet(node)
    assert ends(node) == ["lost"]
    for connection in (scheduler, *workers):
        wait_until(lambda connection=connection: connection.state == "closed" or is_detached(connection))  # type: ignore[misc]
    processes[0].die()  # the scheduler half has mapped nothing: its end decides nothing
    processes[1].die()
    node.wait_for_event("ended")
    quiet(node)
    assert ends(node) == ["lost", 0]
    processes[2].die()
    node.wait_for_event("over")
    assert ends(node) == ["lost", 0, 1, "over"]
    assert not node.host.sessions


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_the_end_of_a_process_loses_the_session_although_its_socket_stays_open(
    node: Node, engine: Engine, dying: int
) -> None:
    """As when a forked child has inherited the socket."""
    scheduler, workers, processes = engine
    processes[dying].die()
    node.wait_for_event("lost")
    for process in processes:
        process.die()
    node.wait_for_event("over")
    assert ends(node)[0] == "lost"
    assert ends(node)[-1] == "over"
    for connection in (scheduler, *workers):
        wait_until(partial(is_detached, connection))


def test_a_session_without_memory_is_over_at_once(node: Node) -> None:
    scheduler = node.attach()
    node.attach_worker(scheduler)
    scheduler.close()
    node.wait_for_event("over")
    assert ends(node) == ["lost", "over"]


def test_a_worker_that_detaches_is_not_waited_for(node: Node, engine: Engine) -> None:
    _, workers, processes = engine
    workers[0].send(Detach("shutdown"))
    node.wait_for_event("ended")
    assert ends(node) == ["lost", 0]
    processes[2].die()
    node.wait_for_event("over")
    assert ends(node) == ["lost", 0, 1, "over"]


def test_a_scheduler_half_that_detaches_leaves_its_workers_memory(
    node: Node, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="kvstow.attach"):
        engine[0].send(Detach())
        node.wait_for_event("lost")
        quiet(node)
    assert ends(node) == ["lost"]
    (said,) = [record for record in caplog.records if " ends: " in record.message]
    assert said.levelname == "INFO"
    assert said.message.endswith("ends: the engine has detached")


def test_a_client_that_detaches_and_closes_need_not_wait_for_answers(
    node: Node, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="kvstow.attach"):
        with node.standing_still():
            engine[0].call(Lookup([b"k"]))
            engine[0].close(Detach())
        node.wait_for_event("lost")
    (said,) = [record for record in caplog.records if " ends: " in record.message]
    assert (said.levelname, said.message.partition(" ends: ")[2]) == ("INFO", "the engine has detached")


def test_a_detach_behind_more_frames_than_one_turn_takes_is_heard(node: Node, engine: Engine) -> None:
    workers = engine[1]
    with node.standing_still():
        for _ in range(200):
            workers[0].send(ReleasedExtents(()))
        workers[0].close(Detach("shutdown"))
    node.wait_for_event("lost")
    quiet(node)
    assert ends(node) == ["lost", 0]


def test_a_detach_is_heard_from_a_client_that_left_answers_unread(node: Node, engine: Engine) -> None:
    scheduler = engine[0]

    def unsent() -> bool:
        return any(client.channel.unsent_bytes for client in node.clients)

    wait_until(unsent, lambda: scheduler.call(Lookup([b"k"])))
    with node.standing_still():
        scheduler.close(Detach("shutdown"))
    node.wait_for_event("lost")
    quiet(node)
    (reason,) = [event[2] for event in node.events("lost")]
    assert reason == "the engine has detached"


def test_a_lost_session_is_not_believed_any_more(node: Node, engine: Engine) -> None:
    scheduler, workers, _ = engine
    assert scheduler.welcome is not None
    with node.standing_still():
        workers[0].close()
        for _ in range(200):
            scheduler.call(Lookup([b"k"]))
    node.wait_for_event("lost")
    late = node.connection(replace(WORKER, token=scheduler.welcome.token, rank=0))
    assert refusal_by(late).startswith("unknown_token: ")
    assert figures_of(node).errors == {}  # the fake host asserts that a lost session makes no call


def test_only_a_farewell_with_an_unknown_token_is_no_refusal(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> bool:
        return bool(figures_of(node).refused)

    with caplog.at_level("WARNING", logger="kvstow_service"), caplog.at_level("WARNING", logger="kvstow.attach"):
        farewell = node.connection(replace(WORKER, token="gone", settled_tokens=("older", "gone")))
        farewell.poll(0.01)
        wait_until(lambda: farewell.state == "detached", lambda: farewell.poll(0.01))
        assert (farewell.refusal, refused()) == (None, False)
        node.next_peer = no_peer  # type: ignore[assignment]
        ended = node.connection(replace(WORKER, token="gone", settled_tokens=("gone",)))
        ended.poll(0.01)
        wait_until(lambda: ended.state == "detached", lambda: ended.poll(0.01))
        assert (ended.refusal, refused()) == (None, False)
        assert "to the attach socket was ended" not in caplog.text
        node.process()
        worker = node.connection(replace(WORKER, token="gone", settled_tokens=("older",)))
        assert refusal_by(worker).startswith("unknown_token: ")
    assert figures_of(node).refused == {"unknown_token": 1}
    who = f"process {os.getpid()} (uid {os.getuid()})"
    assert f"the connection of {who} to the attach socket was ended (unknown_token): " in caplog.text


def no_peer() -> None:
    raise AttachRefusedError("peer_ended", "the process that connected has ended")


def test_the_same_process_may_say_later_that_its_copies_have_ended(node: Node, engine: Engine) -> None:
    scheduler, _, processes = engine
    assert scheduler.welcome is not None
    old = scheduler.welcome.token
    scheduler.close()
    node.wait_for_event("lost")
    node.process()
    again = node.attach()
    node.process(pid=999)
    impostor = node.attach_worker(again, 1, settled_tokens=(old,))
    quiet(node)
    assert ends(node) == ["lost"]  # another process has no say
    impostor.close()
    node.wait_for_event("lost", 2)
    node.process()
    again = node.attach()
    for rank in (0, 1):
        node.next_peer = processes[1 + rank].peer
        worker = node.attach_worker(again, rank, settled_tokens=(old, "nonsense"))
        for fd in next_push(worker).fds:
            os.close(fd)
    wait_until(lambda: ("over", node.events("opened")[0][1]) in node.host.events)
    assert [event[1] for event in node.events("ended")] == [node.events("opened")[0][1]] * 2


def test_an_operator_detaches_a_session_and_frees_nothing(node: Node, engine: Engine) -> None:
    assert not node.server.detach("unknown")
    (session_id,) = node.host.sessions
    assert node.server.detach(session_id)
    node.wait_for_event("lost")
    quiet(node)
    assert ends(node) == ["lost"]
    assert node.events("lost")[0][2] == "an operator has detached it"


def test_too_many_processes_of_lost_sessions_keep_new_ones_of_their_user_out(make_node: MakeNode) -> None:
    node = make_node(limit=4)
    give_memory(node)
    node.clients.limit = 16
    scheduler, _, _ = attach_engine(node)
    scheduler.close()
    node.wait_for_event("lost")
    late = node.connection(HELLO)
    said = "too_many_lost: 2 processes of lost sessions of uid 1000 still have memory mapped, and no more"
    assert refusal_by(late).startswith(said)
    node.process(uid=2000)
    node.attach()


def test_no_clock_frees_anything(make_node: MakeNode) -> None:
    clock = FakeClock()
    node = make_node(clock=clock)
    give_memory(node)
    scheduler, _, _ = attach_engine(node)
    scheduler.close()
    node.wait_for_event("lost")
    clock.advance(1e9)
    quiet(node)
    assert ends(node) == ["lost"]


def test_with_trust_in_eof_a_process_without_a_pidfd_ends_after_its_seconds(make_node: MakeNode) -> None:
    clock = FakeClock()
    node = make_node(clock=clock, trust_eof=30.0)
    give_memory(node)
    node.next_peer = lambda: Peer(0, 1000, 1000, None)
    scheduler = node.attach()
    for fd in next_push(node.attach_worker(scheduler)).fds:
        os.close(fd)
    clock.advance(1000.0)
    quiet(node)
    assert ends(node) == []
    scheduler.close()
    node.wait_for_event("lost")
    clock.advance(29.0)
    quiet(node)
    assert ends(node) == ["lost"]
    clock.advance(2.0)
    quiet(node)
    assert ends(node) == ["lost", 0, "over"]


CLIENT = """
import json, os, sys
from pathlib import Path
from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import Hello
hello = Hello(role="worker", engine="test", host="there", pid=os.getpid(), token=sys.argv[2], rank=int(sys.argv[3]))
connection = AttachConnection(Path(sys.argv[1]), lambda: hello, accepts_fds=True)
fds = ()
while not fds and connection.refusal is None:
    for frame in connection.poll(1.0):
        fds = frame.fds
print(json.dumps(os.fstat(fds[0]).st_size), flush=True)
if sys.argv[4] == "fork" and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["alone", "fork"])
def test_a_real_process_that_is_killed_is_waited_for(make_node: MakeNode, way: str) -> None:
    """With a forked child that keeps the socket open, no end of the connection is ever seen."""
    node = make_node()
    give_memory(node)
    node.process(uid=os.getuid())
    scheduler = node.attach()
    node.next_peer = None
    assert scheduler.welcome is not None
    worker = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(node.path), scheduler.welcome.token, "0", way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout is not None
        assert json.loads(worker.stdout.readline()) == 0
        (session_id,) = node.host.sessions
        assert node.server.detach(session_id, kill=True)
        node.wait_for_event("over")
        assert ends(node) == ["lost", 0, "over"]
