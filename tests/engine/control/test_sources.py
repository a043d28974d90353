"""By whom a pool is used."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.sources import Sources, TopSources
from kvstow.source import NO_SOURCE, Source, source_of
from kvstow.status import SourceStatus
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import FakeRank, make_ranks, store_keys, use_keys

KEY = b"of this pool"


def make_keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name} {number:08}".encode() for number in range(count)]


def salted(salt: str, key: bytes = KEY) -> Source:
    return source_of(key, lora=None, salt=salt, session=None)


class Pool:
    def __init__(self, slots: int) -> None:
        self.engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=slots), clock=FakeClock())
        self.engine.model = "llama"
        self.ranks: list[FakeRank] = make_ranks(self.engine)

    def request(self, keys: list[bytes], source: Source) -> None:
        """As vLLM's requests: looked up, stored as far as it was not found, and used as a whole."""
        found = self.engine.lookup(keys)
        self.engine.count_lookup(len(keys), found, source)
        if keys[found:]:
            store_keys(self.engine, self.ranks, keys[found:])
        use_keys(self.engine, keys, source=source)

    def of(self, source: Source, by: str = "hits") -> SourceStatus:
        (found,) = [one for one in self.engine.sources(by) if one.source == source.salt.hex()]  # type: ignore[arg-type]
        return found


def test_the_digest_of_a_name_depends_on_the_key_and_on_what_it_names() -> None:
    one = source_of(KEY, lora="name", salt="name", session="name")
    assert len({*one}) == 3
    assert one == source_of(KEY, lora="name", salt="name", session="name")
    assert not {*one} & {*source_of(b"other", lora="name", salt="name", session="name")}
    assert source_of(KEY, lora=None, salt="", session=None) == NO_SOURCE
    assert source_of(KEY, lora="\ud800", salt=None, session=None).lora, "half a surrogate is a name, too"


def test_each_pool_has_a_key_of_its_own() -> None:
    assert Sources().key != Sources().key


def test_hits_stores_and_slots_count_once_for_their_source() -> None:
    pool, keys = Pool(64), make_keys(8)
    one, other = salted("one"), salted("other")
    pool.request(keys[:6], one)
    pool.request(keys, one)
    pool.request(make_keys(3, "other"), other)
    assert pool.of(one) == SourceStatus(
        kind="salt",
        source=one.salt.hex(),
        looked_up_blocks=14,
        hit_blocks=6,
        stored_blocks=8,
        slots=8,
        missed_blocks=0,
    )
    assert pool.of(other).stored_blocks == pool.of(other).slots == 3
    (model,) = [row for row in pool.engine.sources() if row.kind == "model"]
    assert (model.source, model.hit_blocks, model.stored_blocks, model.slots) == ("llama", 6, 11, 11)


def test_what_a_request_stores_while_it_runs_counts_when_it_ends() -> None:
    pool, keys, one = Pool(8), make_keys(5), salted("one")
    store_keys(pool.engine, pool.ranks, keys[:2])
    number = pool.engine.admit(keys, source=one)
    store_keys(pool.engine, pool.ranks, keys[2:])
    assert (pool.of(one).stored_blocks, pool.of(one).slots) == (2, 2)
    pool.engine.end_request(number)
    assert (pool.of(one).stored_blocks, pool.of(one).slots) == (5, 5)
    for _ in range(2):  # its answer has a block, which the next request finds
        number = pool.engine.admit(keys, source=one)
        store_keys(pool.engine, pool.ranks, [b"answer"])
        pool.engine.end_request(number, more=[b"answer"])
        assert (pool.of(one).stored_blocks, pool.of(one).slots) == (6, 6)


def test_slots_are_those_that_hold_a_block_now() -> None:
    pool = Pool(8)
    one, other = salted("one"), salted("other")
    pool.request(make_keys(8, "one"), one)
    pool.request(make_keys(5, "other"), other)
    assert (pool.of(one).slots, pool.of(other).slots) == (3, 5)
    store_keys(pool.engine, pool.ranks, make_keys(3, "nobody's yet"))
    assert pool.of(one).slots == 0, "the slots have new content"
    assert pool.of(other).slots == 5
    pool.engine.admin.purge(everything=True).run()
    assert pool.of(other).slots == 0


def test_no_secret_is_in_what_is_shown() -> None:
    pool = Pool(8)
    source = source_of(pool.engine.pool.sources.key, lora="ada", salt="secret", session="who")
    pool.request(make_keys(3), source)
    shown = repr(pool.engine.sources())
    assert not [name for name in ("ada", "secret", "who") if name in shown or name.encode().hex() in shown]
    assert {row.kind: row.source for row in pool.engine.sources() if row.kind != "model"} == {
        "lora": source.lora.hex(),
        "salt": source.salt.hex(),
        "session": source.session.hex(),
    }


def test_a_large_pool_follows_every_third_slot_or_fewer() -> None:
    pool = Pool(10_000)
    one, other = salted("one"), salted("other")
    for number in range(20):
        pool.request(make_keys(400, str(number)), one if number % 4 else other)
    assert len(pool.engine.pool.sources.owners()) <= 8000 / 3 + 20
    assert pool.of(one).slots == pytest.approx(6000, rel=0.02)
    assert pool.of(other).slots == pytest.approx(2000, rel=0.02)


def test_a_pool_that_grows_forgets_the_slots_between() -> None:
    sources = Sources()
    sources.resize(4000)
    sources.count_use("m", salted("a"), [range(4000)], 0)
    sources.resize(5000)
    assert [slot for slot, _ in sources.owners()] == [*range(0, 4000, 3)]
    sources.resize(100)
    sources.count_use("m", salted("a"), [[4001, 4002, 4003]], 0)
    assert len(sources.owners()) == len(range(0, 4000, 3)) + 1, "the stride never falls"


@pytest.mark.parametrize("seed", range(5))
def test_whoever_has_much_is_found_among_any_number_of_sources(seed: int) -> None:
    random, top, kept = Random(seed), TopSources(16), 16
    counts: Counter[str] = Counter()
    for number in range(5000):
        name = f"large {random.randrange(10)}" if random.random() < 0.5 else f"small {number}"
        blocks = random.randrange(1, 20)
        counts[name] += blocks
        top.of(name).looked_up += blocks
    rows = dict(top.rows())
    assert len(rows) <= 2 * kept
    missing = {name for name, count in counts.items() if count > counts.total() / kept} - rows.keys()
    assert not missing
    for name, usage in rows.items():
        assert usage.looked_up <= counts[name] <= usage.most


def test_a_client_that_invents_sources_takes_bounded_memory() -> None:
    sources = Sources()
    for number in range(2000):
        name = number.to_bytes(8, "big")
        sources.count_lookup(str(number), Source(name, name, name), 1, 0)
        sources.count_use(str(number), Source(name, name, name), [range(number, number + 1)], 1)
    rows = sources.statuses((), "hits", 10_000)
    assert max(Counter(row.kind for row in rows).values()) <= 512
    assert len(sources.owners()) <= 4096


def test_those_with_most_come_first() -> None:
    pool = Pool(64)
    for number in range(30):
        for _ in range(number % 3 + 1):
            pool.request(make_keys(1 + number % 2, str(number)), salted(str(number)))
    for by, field in (("hits", "hit_blocks"), ("stores", "stored_blocks"), ("slots", "slots")):
        rows = [row for row in pool.engine.sources(by) if row.kind == "salt"]  # type: ignore[arg-type]
        amounts = [getattr(row, field) for row in rows]
        assert amounts == sorted(amounts, reverse=True)
        assert len(rows) == 20
