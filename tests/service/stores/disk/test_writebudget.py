"""How much may be written, and how much was."""

from __future__ import annotations

from random import Random

from kvstow_service.stores.disk.writebudget import DAY_SECONDS, UsedNames, WriteBudget, WrittenBytes

DAY = 24_000  # bytes, so the bucket holds 1,000


def allowed(budget: WriteBudget, owner: str, size: int, now: float, *, again: bool = False) -> bool:
    if not budget.allows(owner, size, was_used_again=again, now=now):
        return False
    budget.spend(owner, size)
    return True


def test_the_bucket_is_empty_at_the_start_and_holds_an_hours_worth() -> None:
    budget = WriteBudget(DAY, 0.0)
    assert not allowed(budget, "a", 10, 0.0, again=True)
    assert sum(allowed(budget, "a", 10, 36_000.0, again=True) for _ in range(1000)) == 100


def test_below_half_only_blocks_that_were_used_twice_are_written() -> None:
    budget = WriteBudget(DAY, 0.0)
    assert sum(allowed(budget, "a", 10, 3600.0) for _ in range(100)) == 51
    assert not allowed(budget, "a", 10, 3600.0)
    assert sum(allowed(budget, "a", 10, 3600.0, again=True) for _ in range(100)) == 49


def test_two_owners_share_the_rate_and_what_one_leaves_is_the_others() -> None:
    budget, written = WriteBudget(DAY, 0.0), {"a": 0, "b": 0}
    for minute in range(600):
        for owner, tries in (("a", 100), ("b", 1)):
            written[owner] += sum(allowed(budget, owner, 5, minute * 60.0, again=True) for _ in range(tries)) * 5
    total = DAY / DAY_SECONDS * 600 * 60
    assert written["b"] == 599 * 5, "the small one is never short"
    assert 0.97 * total <= sum(written.values()) + DAY / 48 <= total + DAY / 24, "it has saved half a bucket"


def test_the_budget_holds_over_any_day() -> None:
    for seed in range(20):
        random, budget, spent, now = Random(seed), WriteBudget(DAY, 0.0), 0, 0.0
        while now < 3 * DAY_SECONDS:
            now += random.expovariate(1 / 300)
            owner, size = random.choice("abc"), random.randrange(1, 300)
            spent += size * allowed(budget, owner, size, now, again=random.random() < 0.7)
        assert spent <= 3 * DAY + DAY / 24


def test_a_block_larger_than_the_bucket_is_written_when_the_bucket_is_full() -> None:
    budget = WriteBudget(DAY, 0.0)
    assert not allowed(budget, "a", 5000, 1800.0, again=True)
    assert allowed(budget, "a", 5000, 3600.0, again=True)
    assert not allowed(budget, "a", 5000, 3600.0 * 4, again=True), "it has left a debt"


def test_what_was_written_in_a_day_is_forgotten_after_it() -> None:
    written = WrittenBytes(0.0)
    assert written.per_day(60.0) is None
    for hour in range(48):
        written.note(100, hour * 3600.0)
    assert 2300 <= written.today(47 * 3600.0) <= 2400
    assert 2300 <= (written.per_day(47 * 3600.0) or 0) <= 2400
    assert written.today(100 * 3600.0) == 0


def test_an_earlier_use_is_remembered_among_many() -> None:
    names, random = UsedNames(), Random(1)
    digests = [random.randbytes(16) for _ in range(1000)]
    assert not any(names.has(digest) for digest in digests)
    assert sum(names.note(digest) for digest in digests) == 0
    assert sum(names.note(digest) for digest in digests) > 750
    assert not any(names.has(random.randbytes(16)) for _ in range(1000))
