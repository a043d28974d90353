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
from kvstow.control.comparison import SIZES, Comparison, RequestWindow
from kvstow.control.engine import OffloadEngine
from kvstow.control.keyhashes import hash_keys
from kvstow.control.shadows import Followed, HotKeys, Seen, Shadows, Tally, spread
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import make_ranks, store_keys, use_keys


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


def follow(shadows: Shadows, chain: Sequence[bytes], looked_up: range | None = None) -> Tally:
    """What a request has hit that has used this chain, and has looked up all of it, or these positions."""
    tally = Tally()
    shadows.use(choose(shadows, chain), range(len(chain)) if looked_up is None else looked_up, tally)
    return tally


class Pool:
    """An engine with the order of the last use that serves one request at a time."""

    def __init__(self, slots: int) -> None:
        self.clock = FakeClock()
        self.engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=slots, policy="lru"), clock=self.clock)
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
        use_keys(self.engine, chain)
        return lease.num_keys


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)), min_size=1, max_size=60
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from([1.0, 2.0]))
def test_where_all_keys_are_followed_a_shadow_is_exact(requests: list[tuple[list[int], int]], times: float) -> None:
    pool = Pool(int(8 * times))
    shadows = Shadows([1.0, times], 8)
    for numbers, on_gpu in requests:
        chain = chain_of(numbers)
        on_gpu = min(on_gpu, len(chain))
        hits = pool.serve(chain, on_gpu)
        request = follow(shadows, chain, range(on_gpu, len(chain)))
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


def run(shadows: Shadows, requests: list[list[bytes]]) -> list[float]:
    """The ratio of hits of each shadow."""
    tally = Tally()
    for chain in requests:
        tally.add(follow(shadows, chain))
    shadows.check()
    return list(spread(tally.hits, 4) / tally.sampled)


VARIANTS = [1.0, 4.0, 0.5, 2.0]


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
        shadows = Shadows([1.0, 4.0], 2000, 160)
        for number, chain in enumerate(chains):
            found = follow(shadows, [hash_of(each, seed) for each in chain])
            if number >= 200:
                assert list(spread(found.hits, 2)) == [2.0, 2.0]


def test_a_resize_moves_the_shadows_with_the_pool(long_traffic: list[list[bytes]]) -> None:
    shadows = Shadows(VARIANTS, 1000, 4000)
    run(shadows, long_traffic[:500])
    for slots in (1100, 4000, 500, 900):
        shadows.resize(slots)
        assert len(shadows) <= 4000
        run(shadows, long_traffic[500:700])
    shadows.resize(2000)
    run(shadows, long_traffic[:700])
    expected = Shadows(VARIANTS, 2000, 10**6)
    run(expected, long_traffic[:700])
    assert run(shadows, long_traffic[700:]) == pytest.approx(run(expected, long_traffic[700:]), abs=0.05)


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
    run(shadows, long_traffic[700:900])


@pytest.mark.parametrize("parts", [[[1, 2, 1, 3, 2]], [[1, 2], [2, 3], [1]]])
def test_a_client_that_repeats_keys_of_a_chain_harms_no_other(parts: list[list[int]]) -> None:
    """Each key is followed once, and forgotten once when others have taken its place."""
    shadows = Shadows(VARIANTS, 7, 64)
    for at in range(2):
        chains = [[key(number) for number in part] for part in parts]
        chosen = shadows.choose([shadows.part(each, start=2 * place) for place, each in enumerate(chains)])
        request = Tally()
        shadows.use([one for part in chosen for one in part], range(5), request)
        assert (len(shadows), request.sampled) == (3, 3.0)
        assert spread(request.hits, 4).tolist() == [3.0 * at] * 4
        shadows.check()
    for number in range(200):
        follow(shadows, [key(100 + number)])
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
    shadows, tally, number = Shadows([1.0, 0.5], 40_000), Tally(), 0

    def follow_with_others(count: int) -> None:
        nonlocal number
        chains = [[hash_of(b"hot")], *([hash_of(key(number + other))] for other in range(count))]
        number += count
        for chain in shadows.choose([shadows.part(chain) for chain in chains]):
            shadows.use(chain, range(1), tally)

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
        shadows = Shadows([1.0, 2.0], slots, 10_000)
        for number in range(300):
            chain = [*map(key, range(1000)), key(10**6 + number)]
            request = follow(shadows, chain)
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


# -- the window -------------------------------------------------------------------------------------------------------


def test_what_a_pool_of_another_size_has_hit_says_nothing() -> None:
    """A tenth more or less is the same size."""
    window = RequestWindow(1000)
    for _ in range(400):
        window.piece.add(Tally(1, 100, 100.0))
        window.move()
    assert window.is_meaningful
    window.resize(1090)
    assert window.requests > 200
    window.resize(1300)
    assert (window.requests, window.is_meaningful) == (0, False)


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
    """All keys are followed, and the window has just these requests."""
    requests, slots = long_traffic[:152], 160
    pools = [Pool(int(times * slots)) for times in SIZES]
    ratios = [sum(map(pool.serve, requests)) / sum(map(len, requests)) for pool in pools]
    curve = pools[SIZES.index(1.0)].engine.curve()
    assert curve is not None
    assert (curve.requests, curve.blocks) == (152, sum(map(len, requests)))
    assert [point.num_slots for point in curve.points] == [20, 40, 80, 160, 320, 640, 1280]
    assert [point.lru for point in curve.points] == pytest.approx(ratios)
    seen: set[bytes] = set()
    again = 0
    for chain in requests:
        again += len(seen.intersection(chain))
        seen.update(chain)
    assert curve.everything == pytest.approx(again / sum(map(len, requests)))


def test_nothing_is_said_of_keys_that_are_never_in_the_sample() -> None:
    for length, said in ((0, False), (50, True)):
        comparison = Comparison(100_000)
        for number in range(320):
            chain = [hash_of(b"%d %d" % (number, at)) for at in range(length)]
            comparison.use(chain, 0, range(5000), 100_000)
        assert (comparison.curve() is not None) == said


def test_requests_are_followed_together_and_none_is_left_out() -> None:
    """In the order in which they have begun, the last ones before a curve is read or the pool gets another size."""
    one, several = (Comparison(1000) for _ in range(2))
    for number in range(700):
        chain = [hash_of(b"%d" % (number % 90 * 7 + at)) for at in range(7)]
        slots = 1000 if number < 350 else 1040
        for each in (one, several):
            each.use(chain, 0, range(7), slots)
        one.curve()
        assert len(one._shadows) == 7 * min(90, number + 1)
    curve = one.curve()
    assert curve is not None
    assert curve == several.curve()


def test_without_the_setting_nothing_is_followed(make_engine: Callable[..., OffloadEngine]) -> None:
    for policy in ("lru", "auto"):
        engine = make_engine(policy=policy, curve=False)
        assert engine.pool.comparison is None
        use_keys(engine, [key(1)])
        assert engine.curve() is None
