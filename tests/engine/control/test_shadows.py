"""Shadows: what a pool of another order or size would have hit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.config import EngineConfig
from kvstow.control.comparison import CHOICES, SIZES, Change, Chooser, Comparison, RequestWindow
from kvstow.control.engine import OffloadEngine
from kvstow.control.shadows import Followed, Hits, HotKeys, Seen, Shadows, Tally, spread
from kvstow.control.uses import hash_keys
from kvstow.hints import Hints, context_id
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import make_ranks, store_keys


def key(number: int) -> bytes:
    return number.to_bytes(34, "big")


def hash_of(name: bytes, seed: int = 0) -> bytes:
    return b"\0\0" + blake2b(name, key=bytes([seed]), digest_size=32).digest()


def chain_of(numbers: Sequence[int]) -> list[bytes]:
    """A chain in which each key names all before it."""
    chain, name = list[bytes](), 0
    for number in numbers:
        name = name * 7 + number + 1
        chain.append(key(name))
    return chain


def choose(shadows: Shadows, chain: Sequence[bytes]) -> list[Followed]:
    (chosen,) = shadows.choose([shadows.part(chain)])
    return chosen


def follow(shadows: Shadows, chain: Sequence[bytes], now: float, looked_up: range | None = None) -> Tally:
    """What a request has hit that has used this chain, and has looked up all of it, or these positions."""
    tally = Tally()
    shadows.use(choose(shadows, chain), range(len(chain)) if looked_up is None else looked_up, now, tally)
    return tally


class Pool:
    """An engine with a fixed order of eviction that serves one request at a time."""

    def __init__(self, slots: int, k: float) -> None:
        self.clock = FakeClock()
        self.engine = OffloadEngine(
            EngineConfig(slot_bytes=64, capacity_slots=slots, policy=f"{k:g}"), clock=self.clock
        )
        self.ranks = make_ranks(self.engine)

    def serve(self, chain: list[bytes], on_gpu: int = 0) -> int:
        """The hits of a request that has its first blocks on the GPU, and stores what it has not found."""
        self.clock.advance(1.0)
        lease = self.engine.acquire(chain[on_gpu:])
        held = self.engine.acquire_runs(chain)[0]  # as they are on the GPU, they would be stored again
        missing = [each for each, there in zip(chain, self.engine.contains(chain), strict=True) if not there]
        if missing:
            store_keys(self.engine, self.ranks, missing)
        for each in (lease, held):
            self.engine.release_lease(each)
        self.engine.use(chain)
        return lease.num_keys


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)), min_size=1, max_size=60
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from(CHOICES), st.sampled_from([1.0, 2.0]))
def test_where_all_keys_are_followed_a_shadow_is_exact(
    requests: list[tuple[list[int], int]], k: float, times: float
) -> None:
    pool = Pool(int(8 * times), k)
    shadows = Shadows([(0.0, 1.0), (k, times)], 8)
    for numbers, on_gpu in requests:
        chain = chain_of(numbers)
        on_gpu = min(on_gpu, len(chain))
        hits = pool.serve(chain, on_gpu)
        request = follow(shadows, chain, pool.clock(), range(on_gpu, len(chain)))
        assert request.blocks == len(chain) - on_gpu
        assert spread(request.hits, 2)[1] == hits
        shadows.check()


def traffic(count: int, seed: int = 1) -> list[list[bytes]]:
    """Requests that share a system prompt and popular beginnings, each with an end of its own."""
    choose = random.Random(seed)
    requests = []
    for number in range(count):
        document = min(int(choose.expovariate(0.02)), 300)
        beginning = [key(1), key(2), *[key(1000 * (document + 1) + at) for at in range(20)]]
        chain = [*beginning, *[key(10**7 + 100 * number + at) for at in range(choose.randint(1, 8))]]
        requests.append(list(map(hash_of, chain)))
    return requests


@pytest.fixture(scope="module")
def long_traffic() -> list[list[bytes]]:
    return traffic(1500)


def run(shadows: Shadows, requests: list[list[bytes]], start: int = 0) -> list[float]:
    """The ratio of hits of each shadow."""
    tally = Tally()
    for number, chain in enumerate(requests, start):
        tally.add(follow(shadows, chain, float(number)))
    shadows.check()
    return list(spread(tally.hits, 4) / tally.sampled)


VARIANTS = [(0.0, 1.0), (4.0, 1.0), (0.0, 0.5), (0.0, 2.0)]


@pytest.mark.parametrize("most", [8000, 2000])
def test_a_sample_of_the_keys_predicts_the_hits(long_traffic: list[list[bytes]], most: int) -> None:
    everything = run(Shadows(VARIANTS, 2000, 10**6), long_traffic)
    shadows = Shadows(VARIANTS, 2000, most)
    assert shadows.rate == (most - most // 64) / 16_000
    assert run(shadows, long_traffic) == pytest.approx(everything, abs=0.06)
    assert len(shadows) <= most


def test_a_key_of_every_request_is_always_followed(long_traffic: list[list[bytes]]) -> None:
    """Else the common beginning would count for all or for nothing."""
    chains = [[*chain[:2], key(10**9 + number)] for number, chain in enumerate(long_traffic)]
    for seed in range(3):
        shadows = Shadows([(0.0, 1.0), (4.0, 1.0)], 2000, 160)
        for number, chain in enumerate(chains):
            found = follow(shadows, [hash_of(each, seed) for each in chain], float(number))
            if number >= 200:
                assert list(spread(found.hits, 2)) == [2.0, 2.0]


def test_a_resize_moves_the_shadows_with_the_pool(long_traffic: list[list[bytes]]) -> None:
    shadows = Shadows(VARIANTS, 1000, 4000)
    run(shadows, long_traffic[:500])
    for slots in (1100, 4000, 500, 900):
        shadows.resize(slots)
        assert len(shadows) <= 4000
        run(shadows, long_traffic[500:700], 500)
    shadows.resize(2000)
    run(shadows, long_traffic[:700], 700)
    expected = Shadows(VARIANTS, 2000, 10**6)
    run(expected, long_traffic[:700])
    assert run(shadows, long_traffic[700:], 1400) == pytest.approx(run(expected, long_traffic[700:], 700), abs=0.05)


def test_another_rate_keeps_what_it_would_follow(long_traffic: list[list[bytes]]) -> None:
    shadows = Shadows(VARIANTS, 1000, 4000)
    run(shadows, long_traffic[:700])
    before = len(shadows)
    shadows.resize(4000)
    assert shadows.rate == (4000 - 4000 // 64) / 32_000
    assert 0 < len(shadows) < before / 2
    kept = len(shadows)
    shadows.resize(400)
    assert (len(shadows), shadows.rate) == (kept, 1.0)
    shadows.check()
    shadows.resize(10**12)  # few but hot keys are left
    shadows.check()
    run(shadows, long_traffic[700:900], 700)


@pytest.mark.parametrize("parts", [[[1, 2, 1, 3, 2]], [[1, 2], [2, 3], [1]]])
def test_a_client_that_repeats_keys_of_a_chain_harms_no_other(parts: list[list[int]]) -> None:
    """Each key is followed once, and forgotten once when others have taken its place."""
    shadows = Shadows(VARIANTS, 7, 64)
    for at in range(2):
        chains = [[key(number) for number in part] for part in parts]
        chosen = shadows.choose([shadows.part(each, start=2 * place) for place, each in enumerate(chains)])
        request = Tally()
        shadows.use([one for part in chosen for one in part], range(5), at, request)
        assert (len(shadows), request.sampled) == (3, 3.0)
        assert spread(request.hits, 4).tolist() == [3.0 * at] * 4
        shadows.check()
    for number in range(200):
        follow(shadows, [key(100 + number)], 2.0 + number)
    shadows.check()
    assert 63 <= len(shadows) <= 64


def test_hot_keys_are_those_of_more_than_one_request_in_a_hundred() -> None:
    hot = HotKeys()

    def lead(*names: int) -> int:
        """How many leading keys of a request are hot."""
        found = len(list(takewhile(hot.count, names)))
        hot.end(1)
        return found

    for number in range(20_000):
        leading = lead(1, 2 if number % 2 else 3, 10 + number % 300, 10**6 + number)
    assert leading == 2
    assert len(hot.names) == 3
    assert len(hot._counts) <= 4097
    hot.take_changed()
    for number in range(50_000):
        leading = lead(4, 10**7 + number)
    assert (leading, len(hot.names)) == (1, 1)
    assert len(hot.take_changed()) == 4


def test_a_beginning_that_is_hot_no_longer_is_not_followed_for_ever() -> None:
    """Keys stop being hot when many requests are followed at once, and the last one with them is among these."""
    shadows, tally, number = Shadows([(0.0, 1.0), (1.0, 1.0)], 40_000), Tally(), 0

    def follow_with_others(count: int) -> None:
        nonlocal number
        chains = [[hash_of(b"hot")], *([hash_of(key(number + other))] for other in range(count))]
        number += count
        for chain in shadows.choose([shadows.part(chain) for chain in chains]):
            shadows.use(chain, range(1), float(number), tally)

    for _ in range(100):
        follow_with_others(3)
    assert shadows._hot.names
    while shadows._hot.names:
        follow_with_others(1000)
    follow_with_others(1000)
    assert not shadows._recent_hot
    shadows.check()


def test_a_long_common_beginning_is_counted_with_few_keys() -> None:
    """Each of them stands for those around it."""
    for slots in (10**6, 10_000):
        shadows = Shadows([(0.0, 1.0), (2.0, 1.0)], slots, 10_000)
        for number in range(300):
            chain = [*map(key, range(1000)), key(10**6 + number)]
            request = follow(shadows, chain, float(number))
        shadows.check()
        hot = [one for one in choose(shadows, chain) if one[3]]
        assert 40 < len(hot) < 60
        assert sum(one[3] for one in hot) == pytest.approx(1000, abs=32)
        assert list(spread(request.hits, 2)) == pytest.approx([1000, 1000], abs=40)


@pytest.mark.parametrize("slots", [140_000, 100_000])
def test_the_share_of_keys_that_are_followed_is_the_rate(slots: int) -> None:
    """Wherever they are in their chains, and for any length of the keys."""
    choose_bytes = random.Random(1)
    for width in (8, 34):
        shadows = Shadows(VARIANTS, slots)
        chains = [[choose_bytes.randbytes(width) for _ in range(1600)] for _ in range(200)]
        found = [position for chain in chains for _, _, position, _ in choose(shadows, chain)]
        for low, high in ((0, 64), (64, 256), (256, 1600)):
            count = sum(low <= at < high for at in found)
            assert count / 200 / (high - low) == pytest.approx(shadows.rate, rel=3.5 / count**0.5), (width, low)


def test_the_sample_is_one_of_keys_and_not_of_chains() -> None:
    choose_bytes = random.Random(4)
    shadows = Shadows(VARIANTS, 20_000)
    for _ in range(50):
        chain = [choose_bytes.randbytes(34) for _ in range(600)]
        assert 30 < len(choose(shadows, chain)) < 95


@pytest.mark.parametrize("slots", [10**6, 10**5])
def test_a_chain_in_parts_has_the_keys_that_it_has_as_a_whole(slots: int) -> None:
    choose_bytes = random.Random(2)
    shadows = Shadows(VARIANTS, slots)
    chains = [[choose_bytes.randbytes(width) for _ in range(3000)] for width in (34, 34, 8)]
    whole = shadows.choose([shadows.part(chain, tag) for tag, chain in enumerate(chains)])
    for tag, chain in enumerate(chains):
        bounds = sorted({0, 3000, *choose_bytes.sample(range(3000), 3)})
        parts = [shadows.part(chain[low:high], tag, start=low) for low, high in pairwise(bounds)]
        assert [one for part in shadows.choose(parts) for one in part] == whole[tag]
        assert whole[tag]


def test_a_key_is_another_one_in_another_namespace() -> None:
    shadows = Shadows(VARIANTS, 1)
    first, second = shadows.choose([shadows.part([key(1)], tag) for tag in (1, 2)])
    assert first[0][0] != second[0][0]
    assert first[0][0] == hash_keys([key(1)], 1)[0]


def test_what_was_made_before_a_resize_to_a_thinner_sample_is_not_followed() -> None:
    shadows = Shadows(VARIANTS, 10**5)
    part = shadows.part([key(number) for number in range(1000)])
    shadows.resize(10**7)
    assert shadows.choose([part, part]) == [[], []]


def test_what_was_ever_seen_is_known_in_bounded_memory(long_traffic: list[list[bytes]]) -> None:
    def seen(most: int) -> float:
        shadows, found = Shadows(VARIANTS, 100, 10**6), Seen(most)
        tally = Tally()
        for chain in long_traffic:
            found.use(choose(shadows, chain), range(len(chain)), tally)
        assert len(found._level_of) <= most
        return tally.seen_hits / tally.seen_blocks

    known, again, blocks = set[bytes](), 0, 0
    for chain in long_traffic:
        again += len(known.intersection(chain))
        blocks += len(chain)
        known.update(chain)
    assert seen(10**6) == pytest.approx(again / blocks)
    assert seen(1000) == pytest.approx(again / blocks, abs=0.04)


# -- the choice --------------------------------------------------------------------------------------------------------


def hits_of(better: float, by: float) -> Hits:
    """Of 100 blocks."""
    return {(1 << len(CHOICES)) - 1: 50.0, 1 << CHOICES.index(better): by}


def ask(chooser: Chooser, count: int, hits: Hits) -> list[Change]:
    """So many requests of 100 blocks."""
    return [change for _ in range(count) if (change := ended(chooser, hits)) is not None]


def ended(chooser: Chooser, hits: Hits) -> Change | None:
    """A request of 100 blocks."""
    chooser.window.piece.add(Tally(1, 100, 100.0, hits))
    return chooser.look()


def test_another_k_is_taken_when_it_leads_by_half_a_point() -> None:
    chooser = Chooser(RequestWindow(1000))
    assert ask(chooser, 1000, hits_of(4.0, by=0.4)) == []
    (change,) = ask(chooser, 300, hits_of(4.0, by=3.0))
    assert (change.before, change.k, chooser.k) == (0.0, 4.0, 4.0)
    assert change.ratio - change.ratio_before >= 0.005
    assert "k = 0 to k = 4" in str(change)


def test_nothing_is_chosen_before_half_a_window_is_full() -> None:
    """Eight pools of blocks, or 300 requests if those are more."""
    for slots, needed in ((10, 152), (1000, 152), (100_000, 4000)):
        chooser = Chooser(RequestWindow(slots))
        first = next(number for number in range(1, 5000) if ended(chooser, hits_of(1.0, by=20.0)) is not None)
        assert needed <= first <= needed + 16


def test_what_a_pool_of_another_size_has_hit_says_nothing() -> None:
    """A tenth more or less is the same size."""
    window = RequestWindow(1000)
    for _ in range(400):
        window.add(Tally(1, 100, 100.0, hits_of(1.0, by=0.0)))
    assert window.is_meaningful
    window.resize(1090)
    assert window.requests > 200
    window.resize(1300)
    assert (window.requests, window.is_meaningful) == (0, False)


def test_a_choice_lasts_for_a_pool_of_blocks() -> None:
    chooser = Chooser(RequestWindow(20_000))
    assert len(ask(chooser, 2000, hits_of(4.0, by=20.0))) == 1
    changed = []
    for number in range(4000):
        better = CHOICES[number // 40 % len(CHOICES)]
        changed += [number] * (ended(chooser, hits_of(better, by=50.0)) is not None)
    assert all(after - before >= 200 for before, after in pairwise(changed))


def test_a_pool_chooses_for_itself_and_says_so(
    make_engine: Callable[..., OffloadEngine], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents that are read again and again, among ten times as many blocks that are read once."""
    caplog.set_level("INFO", "kvstow.engine")
    engine = make_engine(slots=200, policy="auto")
    ranks = make_ranks(engine)
    for number in range(1200):
        clock.advance(1.0)
        chain = (
            [key(number % 24 * 100 + at) for at in range(5)]
            if number % 2
            else [key(10**6 + number * 100 + at) for at in range(20)]
        )
        lease = engine.acquire(chain)
        store_keys(engine, ranks, chain)
        engine.release_lease(lease)
        engine.use(chain[3:], start=3)
        engine.use(chain[:3], looked_up=(0, len(chain)))
    pool = engine.pool
    assert engine.stats().pool.k == pool.index.uses.k == pool.changes.after(0)[-1].k > 0
    assert f"from k = 0 to k = {pool.changes.after(0)[0].k:g}: over the last" in caplog.text
    engine.admin.set_policy("lru")
    assert engine.stats().pool.k == 0.0
    engine.check_integrity()


def test_chains_that_never_begin_take_a_bounded_amount_of_memory(
    make_engine: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.session.MOST_FOLLOWED", 100)
    engine = make_engine(policy="auto")
    make_ranks(engine)
    for number in range(300):
        engine.use([key(number)], start=300 - number)
    engine.use([], start=1)
    assert len(engine._parts_behind) == 100
    engine.use([key(1000 + number) for number in range(101)], start=1)
    assert len(engine._parts_behind) == 0, "one part is too large"
    engine.use([key(2)], start=1)
    engine.use([key(1)], looked_up=(0, 2))
    assert engine.pool.comparison is not None
    assert len(engine._parts_behind) == engine._parts_behind.num_keys == 0
    assert engine.curve() is None
    assert len(engine.pool.comparison._shadows) == 2


def test_parts_with_hints_that_never_begin_take_a_bounded_amount_of_memory(
    make_engine: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.session.MOST_FOLLOWED", 100)
    monkeypatch.setattr("kvstow.control.session.MOST_CLAIMED", 50)
    engine = make_engine(policy="auto")
    make_ranks(engine)
    engine.use([key(0)], hints=Hints(context_id("a")))
    for number in range(1, 300):
        engine.use([key(number)], start=300 - number, hints=Hints(context_id("a")))
        engine.use([], start=300 - number, hints=Hints(context_id("a")))
    assert (len(engine._tried_behind), len(engine._claimed_behind)) == (100, 50)
    engine.use([key(1000)], hints=Hints(context_id("a")))
    assert (len(engine._tried_behind), engine._tried_behind.num_keys) == (0, 0)
    assert (len(engine._claimed_behind), engine._claimed_behind.num_keys) == (0, 0)


def test_keys_that_a_client_has_made_to_be_followed_all_end_nothing() -> None:
    """Their level is the least there is, so no threshold leaves some of them out."""
    seen = Seen(64)
    for turn in range(2):
        tally = Tally()
        seen.use([(number, 0, number, 0.0) for number in range(65)], range(65), tally)
        assert (tally.seen_blocks > 0) == (turn == 0)
        assert len(seen._level_of) <= 64


# -- the curve ---------------------------------------------------------------------------------------------------------


def test_the_curve_is_what_pools_of_these_sizes_hit(long_traffic: list[list[bytes]]) -> None:
    """All keys are followed, and the window has just these requests. The uses of evicted blocks are not forgotten in
    the same moment."""
    requests, slots = long_traffic[:152], 160
    ratios = []
    for k in (0.0, 2.0):
        pools = [Pool(int(times * slots), k) for times in SIZES]
        hits = [sum(map(pool.serve, requests)) for pool in pools]
        ratios.append([each / sum(map(len, requests)) for each in hits])
    curve = pools[SIZES.index(1.0)].engine.curve()
    assert curve is not None
    assert (curve.requests, curve.blocks, curve.k) == (152, sum(map(len, requests)), 2.0)
    assert [point.num_slots for point in curve.points] == [20, 40, 80, 160, 320, 640, 1280]
    assert [point.lru for point in curve.points] == pytest.approx(ratios[0])
    assert [point.own for point in curve.points] == pytest.approx(ratios[1], abs=0.02)
    seen: set[bytes] = set()
    again = 0
    for chain in requests:
        again += len(seen.intersection(chain))
        seen.update(chain)
    assert curve.everything == pytest.approx(again / sum(map(len, requests)))


def test_nothing_is_said_of_keys_that_are_never_in_the_sample() -> None:
    for length, said in ((0, False), (50, True)):
        comparison = Comparison(100_000, 0.0, has_curve=True)
        for number in range(320):
            part = comparison.part([hash_of(b"%d %d" % (number, at)) for at in range(length)], 0, 0)
            comparison.use([part], range(5000), float(number), 100_000)
        assert (comparison.curve() is not None) == said


def test_requests_are_followed_together_and_none_is_left_out() -> None:
    """In the order in which they have ended, the last ones before a curve is read or the pool gets another size."""
    one, several = (Comparison(1000, 0.0, has_curve=True) for _ in range(2))
    for number in range(700):
        chain = [hash_of(b"%d" % (number % 90 * 7 + at)) for at in range(7)]
        slots = 1000 if number < 350 else 1040
        one.use([one.part(chain, 0, 0)], range(7), float(number), slots)
        parts = [several.part(chain[low:high], 0, low) for low, high in ((0, 3), (3, 7))]
        several.use(parts, range(7), float(number), slots)
        one.curve()
        assert len(one._shadows) == 7 * min(90, number + 1)
    curve = one.curve()
    assert curve is not None
    assert curve == several.curve()


def test_without_the_setting_nothing_is_followed(make_engine: Callable[..., OffloadEngine]) -> None:
    for policy in ("lru", "4"):
        engine = make_engine(policy=policy, curve=False)
        assert engine.pool.comparison is None
        engine.use([key(1)])
        assert engine.curve() is None
    assert make_engine(policy="auto", curve=False).pool.comparison is not None, "it chooses k"
