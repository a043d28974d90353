"""Hints of requests: what is read of them, what is ignored, and that nothing is stored of those that say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.connectors.engine_core.test_lazystores import lazy_host
from tests.service.connectors.engine_core.vllmhost import FakeRequest, VllmHost, keys_of

from kvstow.attach.calls import Admit
from kvstow.hints import Hints, context_id
from kvstow.stats import HINTS_IGNORED
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.hints import UnstoredHashes, hints_of
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

PROMPT = "abcdefgh"


def request_with(given: Any, tokens: str = PROMPT, name: str = "r", **fields: Any) -> Any:
    request = FakeRequest(name, tokens)
    for field, value in {"kv_transfer_params": {"kvstow": given}, **fields}.items():
        setattr(request, field, value)
    return request


def read(given: Any, **fields: Any) -> Hints:
    found = hints_of(request_with(given, **fields))
    assert found is not None
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def test_all_hints() -> None:
    found = read({"context": "trip", "resume_in": 20, "keep_for": 3600, "release": False, "store": True})
    assert found == Hints(context_id("trip"), 20.0, 3600.0, release=False, store=True, name="trip")


def test_a_request_without_a_name_says_when_it_is_continued() -> None:
    assert read({"resume_in": 5, "keep_for": 60}) == Hints(resume_in=5.0, keep_for=60.0)
    assert read({"release": True}) == Hints(release=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "n1"}},
        {"kv_transfer_params": None, "kv_hints": SimpleNamespace(actions=[SimpleNamespace(action_type="share")])},
    ],
)
def test_a_request_without_hints(fields: dict[str, Any]) -> None:
    assert hints_of(request_with(None, **fields)) is None


@pytest.mark.parametrize(
    ("hints", "ignored"),
    [
        ("trip", ("malformed",)),
        ({"context": "trip", "resume_at": 5}, ("unknown",)),
        ({"context": "", "store": False}, ("invalid",)),
        ({"context": "x" * 257}, ("invalid",)),
        ({"context": "a\nb"}, ("invalid",)),
        ({"context": "half a pair: \ud800"}, ("invalid",)),
        ({"context": 7}, ("invalid",)),
        ({"context": "trip", "resume_in": -1}, ("invalid",)),
        ({"context": "trip", "resume_in": float("nan")}, ("invalid",)),
        ({"context": "trip", "resume_in": 10**400}, ("invalid",)),
        ({"context": "trip", "resume_in": True}, ("invalid",)),
        ({"context": "trip", "resume_in": "5"}, ("invalid",)),
        ({"context": "trip", "keep_for": -1}, ("invalid",)),
        ({"context": "trip", "keep_for": 604_801}, ("invalid",)),
        ({"context": "trip", "invalid": True}, ("invalid",)),
        ({"context": "trip", "release": 1, "priority": 3}, ("unknown", "invalid")),
        ({"context": "trip", "store": "no"}, ("invalid",)),
    ],
)
def test_bad_hints_are_ignored_and_counted(hints: Any, ignored: tuple[str, ...]) -> None:
    found = read(hints)
    assert found.ignored == ignored
    assert (found.resume_in, found.keep_for, found.release) == (None, None, False)
    assert set(ignored) <= set(HINTS_IGNORED)


@pytest.mark.parametrize("params", ["kvstow", ["kvstow"], 7, True])
def test_transfer_parameters_that_are_no_object_are_counted(params: Any) -> None:
    found = hints_of(request_with(None, kv_transfer_params=params))
    assert found is not None
    assert (found.ignored, found.context, found.store) == (("malformed",), None, True)


def test_a_bad_hint_leaves_the_others() -> None:
    found = read({"context": "trip", "resume_in": -1, "store": False})
    assert (found.context, found.resume_in, found.store) == (context_id("trip"), None, False)


def test_a_session_is_a_context() -> None:
    assert read(None, session_id="s1") == Hints(context_id("s1"), name="s1")
    assert read({"resume_in": 2}, session_id="s1") == Hints(context_id("s1"), 2.0, name="s1")
    assert read({"context": "branch"}, session_id="s1").name == "branch"


def test_hints_in_vllms_envelope() -> None:
    action = SimpleNamespace(action_type="kvstow", payload={"context": "trip", "resume_in": 3})
    envelope = SimpleNamespace(actions=[SimpleNamespace(action_type="other", payload={}), action])
    assert read(None, kv_transfer_params=None, kv_hints=envelope) == Hints(context_id("trip"), 3.0, name="trip")
    both = request_with({"context": "own"}, kv_hints=envelope)
    assert (hints := hints_of(both)) is not None
    assert hints.name == "own"


def test_contexts_of_two_salts_differ() -> None:
    named = {"context": "trip"}
    ids = {read(named, cache_salt=salt).context for salt in (None, "alice", "bob")}
    assert len(ids) == 3
    assert read({"context": "rip"}, cache_salt="t").context != read({"context": "ip"}, cache_salt="tr").context


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["context", "resume_in", "keep_for", "release", "store", "priority"])


@given(
    params=JSON | st.fixed_dictionaries({"kvstow": JSON | st.dictionaries(NAMES, JSON)}),
    session=JSON,
    salt=st.none() | st.text(),
)
def test_no_hint_is_an_error(params: Any, session: Any, salt: str | None) -> None:
    """What is read can be sent to a service, which accepts it."""
    hints = hints_of(request_with(None, kv_transfer_params=params, session_id=session, cache_salt=salt))
    assert hints is None or set(hints.ignored) <= set(HINTS_IGNORED)
    admit = Admit(1, [b"k"], (0, 1), hints)
    assert Admit.unpack(admit.pack()) == admit


# -- what the pool gets ------------------------------------------------------------------------------------------------


class Admitted(NamedTuple):
    keys: list[bytes]
    hints: Hints | None


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> list[Admitted]:
    """What control planes are told of each request when it is admitted."""
    told: list[Admitted] = []
    admit = EmbeddedControl.admit

    def noted(control: EmbeddedControl, keys: Any, *, hints: Hints | None, **rest: Any) -> int | None:
        told.append(Admitted(list(keys), hints))
        return admit(control, keys, hints=hints, **rest)

    monkeypatch.setattr(EmbeddedControl, "admit", noted)
    return told


def test_hints_come_with_the_admission_and_count_from_the_end(admitted: list[Admitted]) -> None:
    host = VllmHost(step_blocks=3)
    request = request_with({"context": "trip", "resume_in": 10, "when": 3}, PROMPT + "ijkl")
    host.run(request)
    host.step()
    host.clock.advance(4)
    host.finish(request)
    assert [told.hints and told.hints.resume_in for told in admitted] == [10.0]
    assert host.engine.stats().hints_ignored["unknown"] == 1
    (context,) = host.engine.contexts().contexts
    assert context.resume_in_seconds == 10.0


def test_hints_without_a_context_come_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    host = VllmHost()
    for number, hints in enumerate([{"context": "trip"}, {"store": False}, {"resume_in": 1}, {"context": "trip"}]):
        request = request_with(hints, name=str(number))
        host.run(request)
        host.finish(request)
        host.step()
    for _ in range(4):
        host.step()
    assert [one.requests for one in host.engine.contexts().contexts] == [2]


# -- store: false ------------------------------------------------------------------------------------------------------


def unstored(tokens: str = PROMPT, name: str = "unstored") -> Any:
    return request_with({"store": False}, tokens, name)


def finish(host: VllmHost, request: FakeRequest, steps: int = 4) -> None:
    host.finish(request)
    for _ in range(steps):
        host.step()


def test_nothing_of_it_is_stored() -> None:
    host = VllmHost()
    host.run(request := unstored())
    finish(host, request)
    assert host.stored() == set()


def test_it_loads_and_others_store_what_they_share() -> None:
    host = VllmHost()
    host.store(*keys_of(PROMPT[:4]))
    request = unstored()
    assert host.ask(request) == 4
    host.admit(request, load=4)
    host.step()
    host.resume(request, run=4)
    host.step({request: 4})
    finish(host, request)
    assert host.stored() == set(keys_of(PROMPT[:4]))
    other = FakeRequest("other", PROMPT)
    host.run(other, local=len(PROMPT))
    finish(host, other)
    assert host.stored() == set(keys_of(PROMPT))


def test_its_use_ends_where_it_has_computed(admitted: list[Admitted]) -> None:
    host = VllmHost()
    host.store(*keys_of(PROMPT[:4]))
    request = unstored()
    host.ask(request)
    host.admit(request, load=4)
    host.step()
    host.resume(request, run=4)
    host.step({request: 4})
    finish(host, request)
    assert [told.keys for told in admitted] == [keys_of(PROMPT[:4])]


def test_the_backlog_stores_none_of_its_blocks() -> None:
    """They are in GPU blocks whose former contents wait to be stored."""
    host = VllmHost(gpu_blocks=5)
    host.engine.admin.drain("stop_stores", None)
    first = FakeRequest("first", PROMPT)
    host.run(first)
    finish(host, first)
    host.run(request := unstored("ABCDEFGH"))
    finish(host, request)
    host.engine.admin.undrain()
    for _ in range(600):
        host.step()
    assert not host.side.has_pending_stores
    assert host.stored() == set()


def test_lazily_none_of_its_blocks_is_stored_until_another_request_has_them() -> None:
    host = lazy_host(ahead=8)
    host.run(request := unstored())
    finish(host, request)
    assert host.stored() == set()
    other = FakeRequest("other", PROMPT)
    host.run(other, local=len(PROMPT))
    finish(host, other)
    third = FakeRequest("third", "zz")  # takes the block that is evicted next
    host.run(third)
    finish(host, third)
    assert host.stored() == {*keys_of(PROMPT), *keys_of("zz")}


def test_lazily_what_it_has_found_is_stored() -> None:
    host = lazy_host(ahead=8)
    first = FakeRequest("first", PROMPT[:4])
    host.run(first, copy=False)
    host.finish(first)
    request = unstored()
    host.ask(request, 4)
    host.run(request, local=4)
    finish(host, request)
    assert host.stored() == set(keys_of(PROMPT[:4]))


def test_what_a_failed_load_left_to_compute_is_its_own() -> None:
    host = lazy_host(ahead=8)
    host.store(*keys_of(PROMPT[:4]))
    request = unstored()
    host.ask(request)
    host.admit(request, load=4)
    plan = host.step(copy=False)
    (op,) = plan.loads.ops
    for rank in host.ranks:
        rank.send(op.op_id, "failed")
    host.side.settle()
    host.side.failed_loads.continuing({request.request_id})
    host.resume(request, run=8, computed=0)
    host.step({request: 8})
    finish(host, request)
    assert host.stored() == set()


def test_the_hashes_that_are_kept_have_a_bound() -> None:
    known = UnstoredHashes(4, 2)
    for number in range(3):
        tracked = TrackedRequest(unstored(PROMPT + str(number)), 1, hints=Hints(store=False), computed_from=0)
        known.begin(tracked)
        assert tracked.request.block_hashes[3] in known
        known.end(tracked)
    old = TrackedRequest(unstored("zzzzzzzz"), 1, hints=Hints(store=False), computed_from=0)
    known.begin(old)
    known.end(old)
    assert all(block_hash in known for block_hash in old.request.block_hashes)
    assert tracked.request.block_hashes[0] not in known
