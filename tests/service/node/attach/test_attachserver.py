"""Engines attach, are answered, and are told apart."""

from __future__ import annotations

import re
import resource
import select
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.doubles.fakes import FakeClock
from tests.service.node.conftest import HELLO, WORKER, MakeNode, Node, ask, attached, figures_of, refusal_by, wait_until
from tests.service.node.fakehost import FakeSession

import kvstow.attach
import kvstow_service
from kvstow.attach.calls import (
    Admit,
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    DescribeStore,
    Desired,
    End,
    Found,
    Hold,
    LoadBegun,
    Lookup,
    Release,
    Report,
    Reset,
    ResetDone,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.channel import MAX_UNSENT_BYTES, Channel
from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import Refused
from kvstow.attach.wire import MOST_STORED, Kind
from kvstow.descriptions import DescribedBlocks
from kvstow.errors import AttachRefusedError, CallFailedError, DisconnectedError
from kvstow.messages import Completion, RankReport
from kvstow_service.node.attach.clients import REASONS, client_limit

KEYS = [bytes([number]) * 34 for number in range(8)]


def store(scheduler: AttachConnection, keys: list[bytes], ranks: int = 2) -> StoreBegun:
    begun = ask(scheduler, BeginStore(keys), StoreBegun)
    for rank in range(ranks):
        scheduler.send(Completions(rank, "boot", (Completion(begun.op_id, "done"),)))
    return begun


# -- calls -------------------------------------------------------------------------------------------------------


def test_a_scheduler_half_is_welcomed_with_all_that_the_host_says(node: Node) -> None:
    welcome = node.attach().welcome
    assert welcome is not None
    assert (welcome.engine_id, welcome.pool, welcome.namespace, welcome.sharing_off) == (
        "engine-1",
        "model-0a1b2c",
        "model-3d4e5f",
        ("hashes are not reproducible",),
    )
    assert len(welcome.token) >= 20
    assert list(node.host.sessions) == [welcome.session_id]


def test_calls_without_an_answer_reach_the_host_in_order(node: Node) -> None:
    scheduler = node.attach()
    begun = ask(scheduler, BeginStore(KEYS), StoreBegun)
    block = DescribedBlocks((b"tell",))
    scheduler.send(DescribeStore(begun.op_id, (1,), *block))
    for rank in range(2):
        scheduler.send(Completions(rank, "boot", (Completion(begun.op_id, "done"),)))
    found = ask(scheduler, Lookup(KEYS), Found)
    scheduler.send(Admit(3, KEYS, (0, 8)))
    scheduler.send(End(3, "abort"))
    scheduler.send(CountLookup(8, 8))
    scheduler.send(Release((found.lease_id, 12345)))
    with pytest.raises(CallFailedError, match="was released or used up") as caught:
        ask(scheduler, BeginLoad(found.lease_id, 0, 1), LoadBegun)
    assert caught.value.service_code == "lease_invalid"
    assert ask(scheduler, Reset(), ResetDone) == ResetDone("model-99")
    assert node.events("described") == [("described", begun.op_id, (1,), block)]
    assert node.events("admitted") == [("admitted", 8, 3)]
    assert node.events("ended") == [("ended", 3, "abort")]
    assert node.host.queried == 8
    figures = figures_of(node)
    assert figures.errors == {"lease_invalid": 1}
    assert (
        figures.frames["lookup"] == figures.frames["admit"] == figures.frames["end"] == figures.frames["release"] == 1
    )
    assert (figures.clients, figures.strangers, figures.sessions, figures.accepted) == (1, 0, 1, 1)


def test_all_calls_of_the_host_are_made_on_one_thread(node: Node) -> None:
    for _ in range(3):
        store(node.attach(), KEYS)
    assert len(node.host.threads) == 1
    assert threading.get_ident() not in node.host.threads


def test_a_worker_speaks_for_its_own_rank_alone(node: Node) -> None:
    scheduler = node.attach()
    worker = node.attach_worker(scheduler, 1)
    begun = ask(scheduler, BeginStore(KEYS), StoreBegun)
    worker.send(Completions(0, "boot", (Completion(begun.op_id, "done"),)))
    with pytest.raises(CallFailedError, match="rank 1 has sent a report of rank 0"):
        ask(worker, Report(RankReport.without_pool(0, "boot", "ready", 4096)), Desired)
    (session,) = node.host.sessions.values()
    assert session.ops[begun.op_id].pending == {0, 1}
    scheduler.send(Completions(2, "boot", (Completion(begun.op_id, "done"),)))
    ask(scheduler, Reset(), ResetDone)
    assert session.ops[begun.op_id].pending == {0, 1}
    assert figures_of(node).errors["invalid_request"] == 3


def test_messages_are_pushed_from_any_thread_in_order(node: Node) -> None:
    scheduler = node.attach()
    (session,) = node.host.sessions.values()
    for room in range(50):
        session.push(SettledOps((), room))
    seen: list[int] = []
    wait_until(
        lambda: len(seen) == 50,
        lambda: seen.extend(SettledOps.unpack(frame.payload).room for frame in scheduler.poll(0.01)),
    )
    assert seen == list(range(50))


# -- who may attach ----------------------------------------------------------------------------------------------


def test_the_host_may_refuse(node: Node) -> None:
    node.host.refusal = AttachRefusedError("draining", "the service is stopping")
    assert refusal_by(node.connection(HELLO)) == "draining: the service is stopping"


def test_a_peer_without_a_pidfd_is_refused(node: Node) -> None:
    def refuse() -> None:
        raise AttachRefusedError("no_pidfd", "the service cannot see when this process ends")

    node.next_peer = refuse  # type: ignore[assignment]
    assert refusal_by(node.connection(HELLO)).startswith("no_pidfd: the service cannot see")
    wait_until(lambda: figures_of(node).clients == 0)


def test_workers_are_refused_without_token_rank_or_the_uid(node: Node) -> None:
    scheduler = node.attach()
    assert scheduler.welcome is not None
    token = scheduler.welcome.token
    node.attach_worker(scheduler, 0)
    assert refusal_by(node.connection(replace(WORKER, token="guess"))).startswith("unknown_token")
    taken = node.connection(replace(WORKER, token=token))
    assert refusal_by(taken) == "rank: rank 0 of the session is attached already"
    beyond = node.connection(replace(WORKER, token=token, rank=2))
    assert refusal_by(beyond) == "rank: rank is 2; the session has 2 ranks"
    node.process(uid=1001)
    stranger = node.connection(replace(WORKER, token=token, rank=1))
    assert refusal_by(stranger) == "uid: the session belongs to uid 1000, the worker runs as 1001"
    assert scheduler.state == "attached"
    assert [event[0] for event in node.host.events] == ["opened", "joined"]


def test_one_user_leaves_places_for_others(make_node: MakeNode) -> None:
    node = make_node(limit=8)
    for uid, places in ((1000, 4), (2000, 2), (3000, 1)):
        for _ in range(places):
            node.process(uid=uid)
            node.attach()
        node.process(uid=uid)
        refusal = refusal_by(node.connection(HELLO))
        assert refusal.startswith(f"too_many_clients: processes of uid {uid} have as many")


def test_an_eighth_of_the_descriptors_is_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 256))
    assert client_limit() == 32


# -- faults of the host ------------------------------------------------------------------------------------------


def test_an_error_of_the_host_is_answered_logged_and_counted(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    first, second = node.attach(), node.attach()
    node.host.on_lookup = lambda: 1 / 0
    with pytest.raises(CallFailedError, match="its log says how"):
        ask(first, Lookup(KEYS), Found)
    node.host.on_lookup = lambda: None
    assert ask(first, Lookup(KEYS), Found) == ask(second, Lookup(KEYS), Found) == Found(0, ())
    assert figures_of(node).errors == {"internal": 1}
    assert "ZeroDivisionError" in caplog.text


def test_an_error_that_nobody_would_hear_of_ends_the_session(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = node.attach(), node.attach()
    monkeypatch.setattr(FakeSession, "count_lookup", lambda *_: 1 / 0)
    first.send(CountLookup(1, 1))
    assert refusal_by(first).startswith("internal")
    assert ask(second, Reset(), ResetDone) == ResetDone("model-99")
    assert [event[0] for event in node.events("lost", "over")] == ["lost", "over"]


def test_an_error_in_the_end_of_a_session_does_not_touch_the_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node.attach(), node.attach()
    monkeypatch.setattr(FakeSession, "lose", lambda *_: 1 / 0)
    first.close()
    node.wait_for_event("over")
    assert ask(second, Reset(), ResetDone) == ResetDone("model-99")
    assert figures_of(node).errors["internal"] == 1


def test_the_end_of_the_thread_is_seen(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node()
    scheduler = node.attach()
    monkeypatch.setattr(node.host, "expire", lambda: 1 / 0)
    wait_until(lambda: node.failures, lambda: scheduler.poll(0.001) or scheduler.send(CountLookup(1, 1)))
    assert (
        node.failures
        == [node.server.failure]
        == ["the attach server has failed: ZeroDivisionError('division by zero')"]
    )
    wait_until(lambda: scheduler.state == "detached", lambda: scheduler.poll(0.01))


def test_a_failing_action_does_not_end_the_thread(node: Node) -> None:
    node.server.post(lambda: 1 / 0)
    assert ask(node.attach(), Reset(), ResetDone) == ResetDone("model-99")
    assert figures_of(node).errors["internal"] == 1


def test_the_switch_interval_is_short_while_the_server_runs(make_node: MakeNode) -> None:
    before = sys.getswitchinterval()
    node = make_node()
    node.attach()
    assert sys.getswitchinterval() == pytest.approx(0.0001, abs=2e-6)
    node.server.close()
    assert sys.getswitchinterval() == pytest.approx(before)


# -- slow and greedy clients -------------------------------------------------------------------------------------


def raw_session(node: Node) -> Channel:
    """An attached scheduler half that a test drives by hand."""
    return Channel(attached(node))


def test_a_client_that_does_not_read_is_not_read_from_and_hurts_nobody(node: Node) -> None:
    slow, other = raw_session(node), node.attach()
    keys = [struct.pack(">I", number)[1:] for number in range(20_000)]
    for start in range(0, len(keys), 2 * MOST_STORED):  # each second key is present: an answer has 10,000 runs, 50 KB
        store(other, keys[start : start + 2 * MOST_STORED : 2])
    wait_until(lambda: len(node.host.slot_of) == 10_000)
    payload = Lookup(keys, Hold.NOTHING).pack()
    for number in range(1, 80):
        slow.send(Kind.LOOKUP, payload, number)

    def unsent() -> int:
        return sum(client.channel.unsent_bytes for client in node.clients)

    wait_until(lambda: unsent() > 1 << 20, slow.flush)
    assert ask(other, Reset(), ResetDone) == ResetDone("model-99")
    assert unsent() < 2 << 20, "half of the answers"
    answered: list[int] = []

    def read() -> None:
        slow.flush()
        answered.extend(frame.request_id for frame in slow.receive())

    before = figures_of(node).frames["lookup"]
    assert before < 79
    wait_until(lambda: len(answered) == 79, read)  # it goes on where it was left
    assert answered == list(range(1, 80))
    slow.close()
    node.wait_for_event("lost")


def test_a_client_that_lets_pushes_pile_up_is_dropped(node: Node) -> None:
    slow, other = raw_session(node), node.attach()
    session_id = str(node.events("opened")[0][1])
    link: FakeSession = node.host.sessions[session_id]
    for _ in range(2 * MAX_UNSENT_BYTES // 4000):
        link.push(ResetDone("x" * 4000))
    node.wait_for_event("lost")
    assert figures_of(node).refused == {"slow_reader": 1}
    assert ask(other, Reset(), ResetDone) == ResetDone("model-99")
    slow.close()


def test_a_client_with_many_frames_waits_for_the_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read may hold thousands of frames: they are handled in turns."""
    greedy, other = raw_session(node), node.attach()
    many = 500
    frame = Release(()).pack()
    order: list[str] = []
    monkeypatch.setattr(FakeSession, "release_leases", lambda session, _: order.append(session.session_id))
    with node.standing_still():
        for _ in range(many):
            greedy.send(Kind.RELEASE, frame)
        other.send(Release(()))
    wait_until(lambda: len(order) == many + 1)
    other_id = other.welcome.session_id if other.welcome else ""
    assert order.index(other_id) < many // 2
    greedy.close()


def test_a_client_with_frames_that_take_long_waits_for_the_others(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, order = FakeClock(), list[str]()
    node = make_node(clock=clock)
    greedy, other = raw_session(node), node.attach()

    def take_long(session: FakeSession, _: object) -> None:
        order.append(session.session_id)
        clock.advance(0.01)

    monkeypatch.setattr(FakeSession, "release_leases", take_long)
    with node.standing_still():
        for _ in range(50):
            greedy.send(Kind.RELEASE, Release(()).pack())
        other.send(Release((1,)))
    wait_until(lambda: len(order) == 51)
    other_id = other.welcome.session_id if other.welcome else ""
    assert order.index(other_id) <= 2
    greedy.close()


def test_a_call_with_many_items_is_worked_off_between_the_turns_of_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, other = raw_session(node), node.attach()
    order: list[tuple[str, int]] = []
    monkeypatch.setattr(FakeSession, "release_leases", lambda session, ids: order.append((session.session_id, ids[0])))
    other_id = other.welcome.session_id if other.welcome else ""
    with node.standing_still():
        greedy.send(Kind.RELEASE, Release(tuple(range(1, 1001))).pack())
        greedy.send(Kind.RELEASE, Release((2000,)).pack())
        other.send(Release((7,)))
    wait_until(lambda: len(order) == 1002)
    assert order.index((other_id, 7)) <= 3
    assert [number for session, number in order if session != other_id] == [*range(1, 1001), 2000]
    greedy.close()


def test_a_call_with_many_keys_is_unpacked_between_the_turns_of_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last key is malformed, so its refusal shows when all keys have been unpacked."""
    greedy, other = raw_session(node), node.attach()
    refused = node.server.tally.refused
    seen: list[int] = []
    monkeypatch.setattr(FakeSession, "admit", lambda session, call: seen.append(refused["malformed"]))
    with node.standing_still():
        greedy.send(Kind.ADMIT, Admit(0, [b"key"] * 20_000 + [b""], (0, 0)).pack())
        other.send(Admit(0, [], (0, 0)))
    wait_until(lambda: refused["malformed"] == 1)
    wait_until(lambda: len(seen) == 1)
    assert seen == [0]
    greedy.close()


def test_a_refusal_is_read_although_the_client_is_still_sending(node: Node) -> None:
    channel = raw_session(node)
    channel.send(Kind.WELCOME, b"")
    with suppress(DisconnectedError):
        channel.send(Kind.LOOKUP, bytes(100_000))
    wait_until(lambda: select.select([channel], [], [], 0)[0])
    (said,) = channel.receive()
    assert Refused.unpack(said.payload) == Refused("unexpected", "WELCOME does not come from a scheduler")
    channel.close()


def test_every_reason_to_refuse_or_end_a_connection_is_known() -> None:
    root = Path(kvstow_service.__file__).parent / "node"
    files = [*root.rglob("*.py"), *Path(kvstow.attach.__file__).parent.glob("*.py")]
    found = {
        reason
        for path in files
        for reason in re.findall(
            r'(?:AttachRefusedError\(|ProtocolError\(|\.refuse\(|\._drop\(client,|\._drop\(oldest,)\s*"(\w+)"',
            path.read_text(),
        )
    }
    assert len(found) > 15
    of_engines = {"fds_lost", "fds_unannounced"}  # which accept descriptors; the service does not
    assert found - {"disconnected", *of_engines} == set(REASONS)
