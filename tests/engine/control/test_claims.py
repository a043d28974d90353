"""Claims: in which order claimed blocks are evicted, what clients can do with hints, and what is learned of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest
from tests.engine.control.sharedhost import Host as SharedHost

from kvstow.control.claims import _DUE_AT_ONCE, LARGEST_SHARE, UNPROVED_SHARE, ClaimedPart, Claims
from kvstow.control.engine import OffloadEngine, PoolFacade
from kvstow.control.pool import SLICE_SLOTS
from kvstow.errors import InvalidRequestError, NotFoundError
from kvstow.hints import Hints, context_id
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import FakeRank, make_ranks, store_keys

MakeEngine = Callable[..., OffloadEngine]


def make_keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name}{number:08}".encode() for number in range(count)]


class Host:
    """A pool whose requests are served at once."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        self.ranks: list[FakeRank] = make_ranks(engine)

    def serve(self, keys: Sequence[bytes], hints: Hints | None = None) -> int:
        """Returns how many leading blocks were there."""
        lease = self.engine.acquire(keys)
        found = len(lease.slots)
        store_keys(self.engine, self.ranks, list(keys[found:]))
        self.engine.release_lease(lease)
        self.engine.use(keys, hints=hints)
        self.engine.check_integrity()
        return found

    def there(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are there; not a use."""
        return self.engine.lookup(keys)

    @property
    def claims(self) -> Claims:
        claims = self.engine.pool.index.claims
        assert claims is not None
        return claims


@pytest.fixture
def make(make_host: MakeEngine) -> Callable[[int], Host]:
    return lambda slots: Host(make_host(slots=slots))


A, B, C = (context_id(name) for name in "abc")


# -- the order ---------------------------------------------------------------------------------------------------------


def test_what_is_expected_last_goes_first_from_its_end(make: Callable[[int], Host]) -> None:
    host = make(12)
    near, far, new = make_keys(4, "near"), make_keys(4, "far"), make_keys(3, "new")
    host.serve(far, Hints(A, resume_in=500.0))
    host.serve(near, Hints(B, resume_in=5.0))
    host.serve(make_keys(4, "other"), Hints(C, resume_in=50.0))
    host.serve(new)
    assert (host.there(near), host.there(far), host.there(make_keys(4, "other"))) == (4, 1, 4)


def test_a_block_that_others_claim_stays_for_them(make: Callable[[int], Host]) -> None:
    host = make(8)
    shared = make_keys(2, "shared")
    near, far = [*shared, *make_keys(2, "near")], [*shared, *make_keys(2, "far")]
    host.serve(near, Hints(A, resume_in=5.0))
    host.serve(far, Hints(B, resume_in=500.0))
    host.serve(make_keys(4, "new"), Hints(C, resume_in=6.0))  # fills the pool and two slots more
    host.claims.expect(host.engine.pool.index.find_contexts(C)[0], 7.0, 0.0)
    assert (host.there(near), host.there(far)) == (4, 2)


def test_nothing_is_unevictable(make: Callable[[int], Host]) -> None:
    host = make(8)
    for name in ("a", "b"):
        host.serve(make_keys(4, name), Hints(context_id(name), 1.0))
    new = make_keys(8, "new")
    host.serve(new)
    assert host.there(new) == 8
    assert host.engine.stats().pool.slots.cached == 8


def test_a_store_finds_the_slots_of_claims_that_have_all_ended(make: Callable[[int], Host]) -> None:
    host, chain = make(40), make_keys(40)
    for context in (A, B):
        host.serve(chain, Hints(context, 1.0))
    host.claims.set_on(False)
    new = make_keys(4, "new")
    host.serve(new)
    assert host.there(new) == 4


@pytest.mark.parametrize("hints", [Hints(A, 1e5), Hints(A, release=True)])
def test_blocks_can_be_evicted_while_their_claim_is_made(make: Callable[[int], Host], hints: Hints) -> None:
    host, chain = make(8), make_keys(4)
    host.serve(make_keys(1, "other"), Hints(B, 1.0))
    store_keys(host.engine, host.ranks, chain)
    claims, namespace = host.claims, host.engine.namespace
    renewal = claims.begin(namespace, hints, chain, 0.0)
    claims.go_first(0.0)  # another thread evicts
    claims.extend(renewal, namespace.keys.slots_of(chain))
    host.engine.check_integrity()
    claims.finish(renewal)
    new = make_keys(8, "new")
    host.serve(new)
    assert host.there(new) == 8


def test_where_slots_are_out_of_reach_a_shared_block_is_evicted_once(make: Callable[[int], Host]) -> None:
    host, shared = make(8), make_keys(4, "shared")
    host.serve([*shared, *make_keys(4, "end")], Hints(A, 1.0))
    host.serve(shared, Hints(B, 2.0))
    host.serve(shared, Hints(C, 3.0))
    assert len(host.engine.pool.index.evict_below(8, 8, 32).keys) == 8


def test_where_slots_are_out_of_reach_blocks_in_use_keep_no_others_from_eviction(make: Callable[[int], Host]) -> None:
    host, loaded = make(40), make_keys(20, "loaded")
    host.serve(loaded, Hints(A, 500.0))
    host.serve(make_keys(20, "idle"), Hints(B, 5.0))
    lease = host.engine.acquire(loaded)
    assert len(host.engine.pool.index.evict_below(40, 2, 8).keys) == 2
    host.engine.release_lease(lease)


def test_a_released_branch_goes_first_but_not_what_others_have_used(
    make: Callable[[int], Host], clock: FakeClock
) -> None:
    host = make(10)
    prompt = make_keys(2, "prompt")
    host.serve([*prompt, *make_keys(2, "other")])
    clock.advance(1.0)
    branch = [*prompt, *make_keys(2, "branch")]
    host.serve(branch, Hints(A, release=True))
    clock.advance(1.0)
    host.serve(make_keys(4, "new"))
    host.serve(make_keys(2, "newer"))
    assert host.there(branch) == 2
    assert host.there([*prompt, *make_keys(2, "other")]) == 4


def test_a_released_block_that_is_used_again_is_warm(make: Callable[[int], Host], clock: FakeClock) -> None:
    host = make(4)
    branch = make_keys(2, "branch")
    host.serve(branch, Hints(A, release=True))
    clock.advance(1.0)
    host.serve(make_keys(2, "old"))
    clock.advance(1.0)
    host.serve(branch)
    host.serve(make_keys(2, "new"))
    assert (host.there(branch), host.there(make_keys(2, "old"))) == (2, 0)


def test_an_overdue_context_ages_and_is_evicted(make: Callable[[int], Host], clock: FakeClock) -> None:
    host = make(8)
    host.serve(make_keys(4, "late"), Hints(A, resume_in=2.0))
    clock.advance(1000.0)
    host.serve(make_keys(4, "young"))
    clock.advance(1.0)
    host.engine.tick()
    host.serve(make_keys(4, "new"))
    assert (host.there(make_keys(4, "late")), host.there(make_keys(4, "young"))) == (0, 4)


def test_a_chain_is_claimed_up_to_its_first_absent_block(make: Callable[[int], Host]) -> None:
    host = make(8)
    chain = make_keys(6)
    store_keys(host.engine, host.ranks, [*chain[:2], *chain[3:]])
    host.engine.use(chain, hints=Hints(A, resume_in=5.0))
    host.engine.check_integrity()
    assert host.engine.context(A)[0].blocks == 2


def test_a_chain_that_comes_in_parts_is_claimed_as_a_whole(make: Callable[[int], Host]) -> None:
    host, chain, hints = make(8), make_keys(6), Hints(A, resume_in=5.0)
    store_keys(host.engine, host.ranks, chain)
    host.engine.use(chain[4:], start=4, looked_up=(0, 6), hints=hints)
    assert host.engine.context(A) == []
    host.engine.use(chain[:4], hints=hints)
    assert host.engine.context(A)[0].blocks == 6


# -- trust -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hints_of_its_beginning", [Hints(ignored=("rate",)), None])
def test_a_chain_whose_beginning_never_came_is_in_no_other_claim(
    make: Callable[[int], Host], hints_of_its_beginning: Hints | None
) -> None:
    host, chain, other = make(16), make_keys(6), make_keys(4, "other")
    store_keys(host.engine, host.ranks, [*chain, *other])
    host.engine.use(chain[4:], start=4, hints=Hints(A, resume_in=5.0))
    host.engine.use(chain[:4], hints=hints_of_its_beginning)
    host.engine.use(other, hints=Hints(B, resume_in=5.0))
    assert host.engine.context(B)[0].blocks == 4
    host.engine.use(chain[4:], start=4, hints=Hints(A, resume_in=5.0))
    host.engine.use(other, hints=Hints(B, resume_in=5.0))
    assert host.engine.context(B)[0].blocks == 4
    host.engine.check_integrity()


def test_parts_whose_beginning_never_comes_are_not_kept(make: Callable[[int], Host]) -> None:
    host, hints = make(8), Hints(A, resume_in=5.0)
    host.serve(make_keys(2), hints)
    for _ in range(100):
        host.engine.use([], start=1, hints=hints)
        host.engine.use(make_keys(1), start=9, hints=hints)
    assert len(host.engine._claimed_behind) == 1
    for _ in range(100):
        host.engine.use([], start=1, hints=hints)
    assert len(host.engine._claimed_behind) == 0
    assert all(part.keys for part in host.engine._tried_behind)


def kept(host: Host, clock: FakeClock, hints: Hints, count: int, name: str) -> int:
    """Claim so many blocks, and let the time pass for which the policy would have kept them. Returns how many stay."""
    host.serve(make_keys(count, name), hints)
    host.claims.policy_age = 10.0
    host.claims.tick(clock(), 100)
    context = host.engine.pool.index.find_contexts(hints.context or b"")[0]
    context_claims = host.claims
    context_claims.expect(context, hints.resume_in, clock())
    clock.advance(20.0)
    host.engine.tick()
    host.engine.check_integrity()
    return host.engine.context(hints.context or b"")[0].blocks


def test_claims_that_have_proved_nothing_share_a_twentieth(make: Callable[[int], Host], clock: FakeClock) -> None:
    host = make(100)
    names = [f"name{number}" for number in range(10)]
    host.engine.use([], hints=Hints(A))
    blocks = [kept(host, clock, Hints(context_id(name), 1e6), 4, name) for name in names]
    assert sum(blocks) == UNPROVED_SHARE * 100


def test_a_claim_that_is_over_is_kept_no_longer_than_the_policy_would(
    make: Callable[[int], Host], clock: FakeClock
) -> None:
    host = make(100)
    host.serve(make_keys(50), Hints(A, 1.0))
    host.claims.policy_age = 100.0
    for _ in range(30):
        clock.advance(1.0)
        host.engine.tick()
    assert host.engine.context(A)[0].blocks == 50
    clock.advance(70.0)
    host.engine.tick()
    host.engine.check_integrity()
    assert host.engine.context(A)[0].blocks == 0


def test_use_gives_credit_up_to_half_of_the_pool_and_waste_takes_it(
    make: Callable[[int], Host], clock: FakeClock
) -> None:
    host = make(100)
    chain = make_keys(10)
    host.serve(chain, Hints(A, resume_in=1.0))
    assert host.claims.credit == 0
    for _ in range(5):
        clock.advance(1.0)
        host.serve(chain, Hints(A, resume_in=1.0))
    assert host.claims.credit == (LARGEST_SHARE - UNPROVED_SHARE) * 100
    assert kept(host, clock, Hints(B, 1e6), 40, "kept") == 40
    host.serve(make_keys(40, "else"), Hints(B, resume_in=1.0))  # it returns without them
    status = host.engine.claims()
    assert status is not None
    assert (host.claims.credit, status.never_used) == (5, 40)


def test_a_context_keeps_what_it_has_used_again_whatever_others_do(
    make: Callable[[int], Host], clock: FakeClock
) -> None:
    host = make(100)
    for _ in range(2):
        host.serve(make_keys(20), Hints(A, resume_in=1.0))
        clock.advance(1.0)
    host.claims.credit = 0.0  # others have wasted what they were trusted with
    assert kept(host, clock, Hints(B, 1e6), 5, "flood") == 5
    assert kept(host, clock, Hints(C, 1e6), 5, "more") == 0
    host.serve(make_keys(20), Hints(A, resume_in=1e6))
    clock.advance(20.0)
    host.engine.tick()
    assert host.engine.context(A)[0].blocks == 20


def test_who_has_proved_nothing_takes_no_room_of_those_who_have(make: Callable[[int], Host], clock: FakeClock) -> None:
    host = make(100)
    host.engine.use([], hints=Hints(C))
    for _ in range(2):
        host.serve(make_keys(50, "honest"), Hints(A, resume_in=1.0))
        clock.advance(1.0)
    host.serve(make_keys(50, "honest"), Hints(A, resume_in=9000.0))
    host.claims.policy_age = 10.0
    host.claims.expect(host.engine.pool.index.find_contexts(A)[0], 9000.0, clock())
    clock.advance(20.0)
    host.engine.tick()
    assert host.engine.context(A)[0].blocks == 50
    assert kept(host, clock, Hints(B, 60.0), 40, "liar") == 0
    assert host.engine.context(A)[0].blocks == 50


def test_names_that_never_return_make_nobody_go_before_what_the_policy_evicts(
    make: Callable[[int], Host], clock: FakeClock
) -> None:
    host = make(8)
    for number in range(200):
        host.engine.use([], hints=Hints(context_id(str(number)), resume_in=1.0))
    for _ in range(8):
        clock.advance(600.0)
        host.claims.tick(clock(), 100)
        for _ in range(10):
            host.claims.tick(clock(), 100)
    host.serve(make_keys(4, "old"))
    clock.advance(5.0)
    host.serve(make_keys(4, "mine"), Hints(A, resume_in=0.0))
    clock.advance(5.0)
    host.engine.tick()
    host.serve(make_keys(4, "new"))
    assert (host.there(make_keys(4, "old")), host.there(make_keys(4, "mine"))) == (0, 4)


def test_names_push_out_nobody_who_has_brought_blocks(
    make: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.claims.MOST_CONTEXTS", 8)
    host, flood = make(16), make_keys(2, "flood")
    host.serve(flood)
    host.serve(make_keys(2), Hints(A, resume_in=1.0))
    for number in range(100):
        host.serve(flood, Hints(context_id(str(number)), resume_in=1.0))
    assert host.engine.contexts().total == 8
    assert host.engine.context(A) != []


def test_a_released_context_is_forgotten_before_others(
    make: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.claims.MOST_CONTEXTS", 2)
    host = make(16)
    host.serve(make_keys(4, "a"), Hints(A, release=True))
    host.serve(make_keys(2, "b"), Hints(B, resume_in=1.0))
    host.serve(make_keys(2, "c"), Hints(C, resume_in=1.0))
    assert [host.engine.context(one) != [] for one in (A, B, C)] == [False, True, True]


def test_a_context_that_stores_nothing_earns_nothing(make: Callable[[int], Host], clock: FakeClock) -> None:
    host, chain = make(100), make_keys(10)
    for _ in range(3):
        host.engine.use(chain, hints=Hints(A, resume_in=1.0))
        clock.advance(1.0)
    assert host.claims.credit == 0
    assert host.engine.context(A)[0].hits == 0


def test_blocks_of_a_chain_with_gaps_prove_themselves_whatever_slices_they_come_in(
    make_host: MakeEngine, clock: FakeClock
) -> None:
    """Of KV groups with windows, a chain lacks blocks, so a part has blocks of two slices."""
    host = Host(make_host(slots=100, slice_slots=16))
    keys = [number.to_bytes(2, "big") + key for number in range(2) for key in make_keys(20)]
    store_keys(host.engine, host.ranks, keys[::2])
    for _ in range(2):
        clock.advance(1.0)
        host.engine.use(keys, hints=Hints(A, 1.0))
        host.engine.check_integrity()
    context = host.engine.pool.index.find_contexts(A)[0]
    assert (context.num_blocks, context.hits, context.credit) == (20, 20, 20)
    assert not host.claims.is_leaving


def test_what_others_have_used_meanwhile_earns_nothing(make: Callable[[int], Host], clock: FakeClock) -> None:
    host, shared = make(100), make_keys(6, "shared")
    mine = [*shared, *make_keys(4, "mine")]
    host.serve(mine, Hints(A, resume_in=2.0))
    clock.advance(1.0)
    host.serve(shared)
    clock.advance(1.0)
    host.serve(mine, Hints(A, resume_in=2.0))
    assert host.claims.credit == 4
    assert host.engine.context(A)[0].hits == 10


def test_a_claim_that_is_overtaken_is_paid_for(make: Callable[[int], Host], clock: FakeClock) -> None:
    """Two requests of a context end at once; what it had kept for nothing counts although the first claim is not
    finished."""
    host = make(100)
    host.engine.use([], hints=Hints(A))
    assert kept(host, clock, Hints(B, 1e6), 5, "kept") == 5
    first = host.claims.begin(host.engine.namespace, Hints(B, 1.0), make_keys(1), clock())
    second = host.claims.begin(host.engine.namespace, Hints(B, 1.0), make_keys(1), clock())
    for renewal in (first, second):
        host.claims.finish(renewal)
    assert host.claims.never_used == 5


def test_a_context_that_is_expected_sooner_gets_the_room_of_one_that_is_expected_later(
    make: Callable[[int], Host], clock: FakeClock
) -> None:
    host = make(100)
    host.engine.use([], hints=Hints(C))
    host.claims.credit = LARGEST_SHARE * 100
    assert kept(host, clock, Hints(A, 9000.0), 40, "later") == 40
    assert kept(host, clock, Hints(B, 3000.0), 40, "sooner") == 40
    assert host.engine.context(A)[0].blocks == 0


def test_thousands_of_contexts_make_room_for_one_a_few_at_a_time(make: Callable[[int], Host], clock: FakeClock) -> None:
    """The pool's lock is held."""
    host = make(400)
    host.engine.use([], hints=Hints(C))
    host.claims.credit = LARGEST_SHARE * 400
    for number in range(60):
        assert kept(host, clock, Hints(context_id(f"{number}"), 90_000.0), 3, f"{number:03}") == 3
    kept(host, clock, Hints(B, 30_000.0), 150, "sooner")
    assert host.claims.kept == (60 - _DUE_AT_ONCE) * 3
    host.engine.tick()
    assert host.engine.context(B)[0].blocks == 150
    assert 180 <= host.claims.kept <= LARGEST_SHARE * 400
    host.engine.check_integrity()


def test_claims_end_with_the_last_client_that_gives_hints(make: Callable[[int], Host], clock: FakeClock) -> None:
    host = make(8)
    host.serve(make_keys(4), Hints(A, resume_in=1e6))
    clock.advance(3000.0)
    host.engine.tick()
    assert host.engine.claims() is not None
    clock.advance(3000.0)
    host.engine.tick()
    assert (host.engine.claims(), host.engine.pool.trial) == (None, None)
    host.engine.check_integrity()
    host.serve(make_keys(6, "new"))
    assert host.there(make_keys(6, "new")) == 6


# -- whose hints count -------------------------------------------------------------------------------------------------


def test_contexts_of_two_salts_are_two(make: Callable[[int], Host]) -> None:
    host = make(8)
    host.serve(make_keys(3, "victim"), Hints(context_id("agent", "salt"), resume_in=1.0))
    host.serve(make_keys(3, "attacker"), Hints(context_id("agent", "other"), release=True))
    assert host.engine.context(context_id("agent", "salt"))[0].blocks == 3


def test_contexts_of_two_namespaces_are_two() -> None:
    host = SharedHost(slots=8)
    first, second = host.attach(namespace="a"), host.attach(namespace="b")
    for client, keys in ((first, make_keys(3)), (second, make_keys(2))):
        client.store(keys)
        client.session.use(keys, hints=Hints(A, resume_in=60.0))
    assert sorted(context.blocks for context in PoolFacade(host.pool).context(A)) == [2, 3]
    second.session.use(make_keys(2), hints=Hints(A, release=True))
    assert sorted(context.blocks for context in PoolFacade(host.pool).context(A)) == [0, 3]


def test_a_client_that_repeats_a_key_claims_nothing(make: Callable[[int], Host]) -> None:
    host, keys = make(8), make_keys(3)
    host.serve(keys)
    host.engine.use([*keys, keys[0]], hints=Hints(A, resume_in=1.0))
    host.engine.check_integrity()
    assert host.engine.context(A) == []


# -- blocks that go ----------------------------------------------------------------------------------------------------


def test_slots_that_are_lost_and_filled_again_are_not_claimed(make: Callable[[int], Host]) -> None:
    host, chain = make(4), make_keys(4)
    host.serve(chain, Hints(A, resume_in=1.0))
    host.engine.admin.purge(keys=chain).run()
    host.engine.check_integrity()
    host.serve(make_keys(4, "other"))
    assert len(host.claims.claimed) == 0
    host.serve(make_keys(4, "more"), Hints(A, resume_in=1.0))
    assert len(host.claims.claimed) == 4


# -- costs -------------------------------------------------------------------------------------------------------------


class Reads(list[int]):
    number = 0

    def __getitem__(self, at: Any) -> Any:
        self.number += 1
        return super().__getitem__(at)


def test_a_long_chain_is_walked_in_slices(
    make: Callable[[int], Host], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, chain = make(4096), make_keys(4000)
    host.serve(chain, Hints(A, resume_in=1e5))
    claims, copied, cut = host.claims, list[int](), ClaimedPart.cut

    def noted(part: ClaimedPart, length: int) -> ClaimedPart:
        end = cut(part, length)
        copied.append(len(end.slots))
        return end

    monkeypatch.setattr(ClaimedPart, "cut", noted)
    claims.policy_age = 10.0
    claims.expect(host.engine.pool.index.find_contexts(A)[0], 1e5, clock())
    clock.advance(20.0)
    claims.tick(clock(), 1)
    assert host.engine.context(A)[0].blocks == int(UNPROVED_SHARE * 4096)
    assert 0 < sum(copied) <= SLICE_SLOTS, "what is kept longer is cut off the rest"
    host.engine.admin.purge(keys=chain[-1:]).run()
    reads = claims._lost_at = Reads(claims._lost_at)  # type: ignore[assignment]
    renewal = claims.begin(host.engine.namespace, Hints(A, resume_in=1.0), chain, clock())
    assert reads.number == 0
    claims.extend(renewal, host.engine.namespace.keys.slots_of(chain[:SLICE_SLOTS]))
    assert 0 < reads.number <= 4 * SLICE_SLOTS
    assert len(claims.next_slots(7)) == 7


# -- operators ---------------------------------------------------------------------------------------------------------


def test_contexts_are_listed_by_size(make: Callable[[int], Host], clock: FakeClock) -> None:
    host = make(16)
    host.serve(make_keys(2, "a"), Hints(A, resume_in=30.0, name="small"))
    host.serve(make_keys(5, "b"), Hints(B, release=True))
    host.serve(make_keys(4, "c"), Hints(C))
    clock.advance(10.0)
    page = host.engine.contexts(limit=2)
    assert (page.next_rank, page.total) == (2, 3)
    (small,) = host.engine.context(A)
    assert (small.name, small.blocks, small.requests, small.idle_seconds) == ("small", 2, 1, 10.0)
    assert (small.resume_in_seconds, small.is_hinted) == (20.0, True)
    assert host.engine.context(B)[0].resume_in_seconds is None


def test_an_operator_releases_a_context_and_says_when_it_comes_back(make: Callable[[int], Host]) -> None:
    host = make(8)
    for name in (A, B):
        host.serve(make_keys(4, name.hex()), Hints(name, resume_in=5.0))
    assert host.engine.admin.release_context(A) == 4
    host.engine.admin.set_context(B, 900.0)
    host.serve(make_keys(2, "new"))
    assert (host.there(make_keys(4, A.hex())), host.there(make_keys(4, B.hex()))) == (2, 4)
    with pytest.raises(NotFoundError, match="there is no context"):
        host.engine.admin.release_context(C)
    with pytest.raises(InvalidRequestError, match="resume_in is inf; allowed"):
        host.engine.admin.set_context(A, inf)


def test_evict_and_purge_take_a_context(make: Callable[[int], Host]) -> None:
    host = make(12)
    shared = make_keys(2, "shared")
    host.serve([*shared, *make_keys(3, "a")], Hints(A, resume_in=5.0))
    host.serve([*shared, *make_keys(3, "b")], Hints(B, resume_in=5.0))
    assert host.engine.admin.evict(context=A, dry_run=True).run().evicted_slots == 3
    assert host.engine.admin.evict(context=A).run().evicted_slots == 3
    host.engine.check_integrity()
    assert (host.there([*shared, *make_keys(3, "b")]), host.engine.context(A)[0].blocks) == (5, 0)
    assert host.engine.admin.purge(context=B).run().evicted_slots == 5
    host.engine.check_integrity()
    assert host.there(shared) == 0


def test_a_purged_context_has_no_stores_in_flight(make: Callable[[int], Host]) -> None:
    host, (first, second) = make(8), make_keys(2)
    host.serve([first], Hints(A, resume_in=5.0))
    op = host.engine.begin_store([second], [0]).op
    host.engine.admin.purge(context=A, dry_run=True).run()
    host.engine.admin.evict(context=A).run()
    assert second in host.engine.namespace.pending_stores
    host.engine.admin.purge(context=A).run()
    host.ranks[0].submit(op)
    host.ranks[0].run_all()
    assert host.engine.contains([first, second]) == [False, False]
    host.engine.check_integrity()


# -- the trial ---------------------------------------------------------------------------------------------------------


def test_hints_that_cost_hits_are_switched_off_and_the_pool_says_so(
    make: Callable[[int], Host], clock: FakeClock
) -> None:
    """Each of four contexts comes back at once and says that it comes back late; new blocks come between."""
    host = make(32)
    chains = [make_keys(5, f"chain{number}-") for number in range(4)]
    for number in range(900):
        clock.advance(1.0)
        host.engine.use([], hints=None)
        name = context_id(str(number % 4))
        lease = host.engine.acquire(chains[number % 4])
        store_keys(host.engine, host.ranks, chains[number % 4][len(lease.slots) :])
        host.engine.release_lease(lease)
        host.engine.use(chains[number % 4], hints=Hints(name, release=True))
        fresh = make_keys(2, f"fresh{number}-")
        store_keys(host.engine, host.ranks, fresh)
        host.engine.use(fresh)
        if host.engine.claim_switches(0)[0]:
            break
    count, (switch, *_) = host.engine.claim_switches(0)
    status = host.engine.claims()
    assert status is not None
    assert (count, switch.is_on, status.is_on, status.switches) == (1, False, False, 1)
    assert switch.ratio_without - switch.ratio_with >= 0.005
    assert "hints are not used any more: over the last" in str(switch)
    host.engine.tick()
    host.engine.check_integrity()
