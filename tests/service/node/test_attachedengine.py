"""The scheduler half of an engine over a real attach server, whose control plane is a fake."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.doubles.fakes import FakeClock
from tests.service.node.conftest import (
    DEADLINE_SECONDS,
    NAMESPACE,
    POOL,
    MakeNode,
    MakeWholeNode,
    Node,
    figures_of,
    wait_until,
)

from kvstow.attach.calls import Hold, SettledOps
from kvstow.attach.connection import Answer, AttachConnection
from kvstow.attach.engine import PROBE_BLOCKS, PROBE_SECONDS, AttachedEngine, Hits
from kvstow.attach.hello import number_of
from kvstow.errors import NotFoundError
from kvstow.messages import Completion, Op
from kvstow.prefill import PrefillCost, PrefillNews
from kvstow.results import Lease

KEYS = [bytes([number]) * 32 for number in range(1, 7)]
RANKS = range(POOL.num_ranks)
BOOT = "boot-1"


class Engine(AttachedEngine):
    """With what a host does in its steps."""

    def until_attached(self) -> None:
        wait_until(lambda: self.is_attached, self.step)

    def taken(self, answer: Answer[Op | None]) -> Op:
        assert self.wait(answer, seconds=DEADLINE_SECONDS)
        assert answer.value is not None, answer.error
        return answer.value

    def found(self, keys: list[bytes], hold: Hold = Hold.PRESENT) -> Hits:
        answer = self.find(keys, hold=hold)
        assert self.wait(answer, seconds=DEADLINE_SECONDS)
        return answer.value

    def finish(self, op: Op) -> None:
        for rank in RANKS:
            self.complete(rank, BOOT, [Completion(op.op_id, "done")])

    def begin_storing(self, keys: list[bytes]) -> Op:
        answer = self.begin_store(keys, range(len(keys)))
        assert self.wait(answer, seconds=DEADLINE_SECONDS)
        assert answer.value.op is not None
        return answer.value.op

    def store_blocks(self, keys: list[bytes]) -> None:
        op = self.begin_storing(keys)
        self.finish(op)
        marks = list[str]()

        def step() -> None:
            self.step()
            marks.extend(settled.mark for settled in self.take_settled())

        wait_until(lambda: "done" in marks, step)


def make(path: Path, **options: object) -> Engine:
    return Engine(path, engine="test", pool=POOL, namespace=NAMESPACE, **options)  # type: ignore[arg-type]


@pytest.fixture
def engine(node: Node) -> Iterator[Engine]:
    made = make(node.path)
    made.until_attached()
    yield made
    made.close()


def lose(engine: Engine, node: Node) -> None:
    """The service drops the session."""
    assert engine.welcome is not None
    node.server.detach(engine.welcome.session_id)
    wait_until(lambda: not engine.is_attached, engine.step)


def test_a_host_sees_what_it_attached_to(engine: Engine) -> None:
    assert engine.welcome is not None
    assert engine.ticket is not None
    assert (engine.problem, engine.refusal, engine.num_sessions) == (None, None, 1)
    assert engine.ticket == (1, engine.welcome.token)
    assert (engine.welcome.pool, engine.welcome.namespace) == ("model-0a1b2c", "model-3d4e5f")
    assert engine.sharing_off == ("hashes are not reproducible",)


def test_what_is_said_of_a_request_after_its_end_is_known_too(engine: Engine, node: Node) -> None:
    first, second = engine.admit(KEYS), engine.admit(KEYS)
    assert not engine.end_request(first)
    (session,) = node.host.sessions.values()
    node.server.post(lambda: session.push(SettledOps((), 0, (first, second))))
    late = list[int]()

    def step() -> None:
        engine.step()
        late.extend(engine.take_late())

    wait_until(lambda: late, step)
    assert late == [first]
    assert engine.end_request(second)
    assert engine.take_late() == []


@pytest.mark.parametrize("name", ["r" * 5000, "r\ud800"])
def test_a_request_may_have_any_name(engine: Engine, name: str) -> None:
    answer = engine.begin_store(KEYS[:2], [1, 2], request_id=name)
    assert engine.wait(answer, seconds=DEADLINE_SECONDS)
    assert answer.value.op is not None
    engine.finish(answer.value.op)
    op = engine.taken(engine.begin_load(engine.found(KEYS[:2]).lease, [7, 8], request_id=name))
    engine.finish(op)
    assert [settled.request_id for settled in engine.take_settled()][-1] == name
    assert engine.num_sessions == 1


def test_a_store_says_what_became_of_each_key(engine: Engine) -> None:
    engine.store_blocks(KEYS[:2])
    answer = engine.begin_store(KEYS[:4], [10, 11, 12, 13])
    assert engine.wait(answer, seconds=DEADLINE_SECONDS)
    grant = answer.value
    assert grant.op is not None
    assert (grant.accepted, grant.op.blocks, len(grant.op.slots)) == ((2, 3), (12, 13), 2)
    assert engine.store_room() == 1000
    engine.finish(grant.op)
    wait_until(lambda: engine.store_room() == 7, engine.step)
    skipped = engine.begin_store(KEYS[:1], [10])
    assert engine.wait(skipped, seconds=DEADLINE_SECONDS)
    assert (skipped.value.op, skipped.value.outcomes) == (None, {"skipped_already_cached": 1})


def test_all_waits_of_a_step_share_its_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = FakeClock(), list[float]()
    engine = make(node.path, step_wait=0.02, clock=clock)
    engine.until_attached()
    engine.step()

    def wait_in_vain(_connection: AttachConnection, _answer: Answer[object], seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    monkeypatch.setattr(AttachConnection, "wait", wait_in_vain)
    with node.standing_still():
        first, second = engine.find(KEYS), engine.find(KEYS)
        assert not engine.wait(first, second)
        engine.step()
        assert not engine.wait(second)
    assert waits == [0.02, 0.0, 0.02]
    engine.close()


def test_completions_of_a_step_go_in_one_frame_for_each_rank_and_before_the_next_call(
    engine: Engine, node: Node
) -> None:
    ops = [engine.begin_storing([key]) for key in KEYS[:3]]
    before = figures_of(node).frames
    for op in ops:
        engine.finish(op)
    assert engine.found(KEYS[:3]).leading == 3
    after = figures_of(node).frames
    assert {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]} == {
        "completions": 2,
        "lookup": 1,
    }


def test_a_lease_is_released_once_and_by_those_who_do_not_want_the_answer(engine: Engine, node: Node) -> None:
    engine.store_blocks(KEYS[:1])
    (session,) = node.host.sessions.values()
    with node.standing_still():
        unwanted = engine.find(KEYS)
        engine.discard(unwanted)
    wanted = engine.found(KEYS)
    assert unwanted.done
    wait_until(lambda: len(session.leases) == 1, engine.step)
    engine.release_lease(wanted.lease)
    wait_until(lambda: not session.leases, engine.step)
    answer = engine.begin_load(wanted.lease, [1])
    assert engine.wait(answer, seconds=DEADLINE_SECONDS)
    assert answer.value is None
    assert "released" in str(answer.error)
    engine.release_lease(Lease(0))


def test_without_a_service_everything_misses_and_says_why(tmp_path: Path) -> None:
    engine = make(tmp_path / "none.sock")
    engine.step()
    assert not engine.is_attached
    assert engine.problem is not None
    hits, grant, load = engine.find(KEYS), engine.begin_store(KEYS, range(6)), engine.begin_load(Lease(0), [1])
    assert all(answer.done for answer in (hits, grant, load))
    assert (hits.value.lease.num_keys, hits.value.runs, load.value) == (0, (), None)
    assert (grant.value.op, list(grant.value.unplaced), grant.value.outcomes) == (
        None,
        list(range(6)),
        {"dropped_not_ready": 6},
    )
    assert engine.reset().value == ""
    assert engine.store_room() == 0
    engine.end_request(engine.admit(KEYS))
    engine.count_lookup(3, 0)
    engine.complete(0, BOOT, [Completion(5, "done")])
    assert (engine.take_settled(), engine.sharing_off, engine.ticket) == ([], (), None)
    engine.close()


def test_the_end_of_a_session_voids_its_leases_and_answers(engine: Engine, node: Node) -> None:
    engine.store_blocks(KEYS[:1])
    hits = engine.found(KEYS)
    with node.standing_still():
        asked = engine.find(KEYS)
        assert engine.welcome is not None
        engine.disconnect("a test has cut it")
    assert (asked.done, asked.value.runs, asked.error) == (True, (), "a test has cut it")
    assert (engine.ticket, engine.store_room()) == (None, 0)
    load = engine.begin_load(hits.lease, [1])
    assert (load.done, load.value) == (True, None)
    wait_until(lambda: engine.is_attached, engine.step)
    load = engine.begin_load(hits.lease, [1])
    assert (load.value, load.error) == (None, "the session of the lease has ended")
    engine.release_lease(hits.lease)
    assert engine.ticket is not None
    assert engine.ticket.number == engine.num_sessions == 2


def test_ops_of_a_lost_session_end_locally_and_their_late_completions_are_not_said_in_the_next(
    engine: Engine, node: Node
) -> None:
    engine.store_blocks(KEYS[:1])
    load = engine.taken(engine.begin_load(engine.found(KEYS[:1]).lease, [3]))
    store = engine.begin_storing(KEYS[1:2])
    lose(engine, node)
    node.host.next_id = 0  # another service counts from 1 again
    engine.until_attached()
    again = engine.begin_storing(KEYS[2:3])
    assert number_of(load.op_id) != number_of(again.op_id)
    before = figures_of(node).frames["completions"]
    engine.finish(load)
    engine.finish(store)
    assert [(s.op_id, s.mark) for s in engine.take_settled()] == [(load.op_id, "done"), (store.op_id, "failed")]
    assert engine.found(KEYS[:3]).runs == ((0, 1),)
    assert figures_of(node).frames["completions"] == before
    engine.finish(again)
    assert engine.found(KEYS[:3]).runs == ((0, 1), (2, 1))


def test_a_full_service_is_asked_again_now_and_then(make_node: MakeNode) -> None:
    clock = FakeClock()
    engine = make(make_node().path, clock=clock)
    engine.until_attached()
    assert engine.store_room() == PROBE_BLOCKS
    engine.begin_store(KEYS, range(6))
    assert engine.store_room() == 0
    clock.advance(PROBE_SECONDS)
    assert engine.store_room() == PROBE_BLOCKS
    engine.close()


def test_a_lookup_that_takes_time_holds_up_no_other_answer(engine: Engine, node: Node) -> None:
    engine.store_blocks(KEYS[:2])
    node.host.holds_lookups = True
    first, second = engine.find(KEYS[:2]), engine.find(KEYS[:1])
    wait_until(lambda: first.is_pending and second.is_pending, engine.step)
    assert not engine.wait(first, seconds=DEADLINE_SECONDS), "it does not wait for what takes time"
    node.host.holds_lookups = False
    assert engine.found(KEYS[:2]).leading == 2
    engine.discard(second)
    node.server.post(node.host.answer_held)
    wait_until(lambda: first.done and second.done, engine.step)
    assert (first.value.leading, first.error) == (2, None)
    (session,) = node.host.sessions.values()
    wait_until(lambda: len(session.leases) == 2, engine.step)  # without that of the answer that nobody wants


@pytest.mark.parametrize("error", [NotFoundError("no pool"), ZeroDivisionError()])
def test_an_error_in_a_late_answer_is_the_answer(engine: Engine, node: Node, error: Exception) -> None:
    engine.store_blocks(KEYS[:2])
    node.host.holds_lookups = True
    first, second = engine.find(KEYS[:2]), engine.find(KEYS[:2])
    wait_until(lambda: first.is_pending and second.is_pending, engine.step)
    node.host.holds_lookups = False
    errors: list[Exception] = [error]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    node.host.on_lookup = fail_once
    node.server.post(node.host.answer_held)  # the newest first
    wait_until(lambda: first.done and second.done, engine.step)
    assert first.value.leading == 2
    assert second.error
    assert not second.value.runs
    assert figures_of(node).errors == {"not_found" if isinstance(error, NotFoundError) else "internal": 1}
    assert engine.num_sessions == 1


def test_the_server_wakes_when_a_lookup_has_waited_long_enough(engine: Engine, node: Node) -> None:
    node.host.holds_lookups = True
    answer = engine.find(KEYS[:2])
    wait_until(lambda: answer.is_pending, engine.step)
    begun = time.monotonic()
    node.server.post(lambda: setattr(node.host, "deadline", begun + 0.05))
    wait_until(lambda: answer.done, engine.step)
    assert time.monotonic() >= begun + 0.05, "not before"


def test_an_answer_that_was_to_come_fails_with_the_session(engine: Engine, node: Node) -> None:
    node.host.holds_lookups = True
    answer = engine.find(KEYS[:2])
    wait_until(lambda: answer.is_pending, engine.step)
    lose(engine, node)
    assert answer.done
    assert not answer.value.runs
    node.server.post(node.host.held.clear)


def test_the_speed_of_prefill_reaches_the_service(engine: Engine, node: Node) -> None:
    news = PrefillNews(PrefillCost(1e-4, 1e-9, 4096.0), 4096, 0.5, 0.25, 3)
    engine.note_prefill(news)
    wait_until(lambda: node.events("prefill"), engine.step)
    assert node.events("prefill") == [("prefill", news)]


def test_an_engine_that_was_reset_does_not_come_back_to_its_old_namespace(make_whole_node: MakeWholeNode) -> None:
    node = make_whole_node()
    node.start()
    with closing(make(node.settings.attach_path)) as engine:
        engine.until_attached()
        assert engine.welcome is not None
        before = engine.welcome.namespace
        assert engine.wait(engine.reset(), seconds=DEADLINE_SECONDS)
        node.detach(engine.welcome.session_id)
        wait_until(lambda: engine.num_sessions == 2 and engine.is_attached, engine.step)
        assert engine.welcome.namespace != before
