from __future__ import annotations

import pytest
from tests.engine.tier.storecontract import StoreContract

from kvstow.tier.memorystore import MemoryStore
from kvstow.tier.store import TierStore


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def tier(self) -> TierStore:
        return MemoryStore()


def test_the_least_recently_used_object_goes_first() -> None:
    store = MemoryStore(capacity_bytes=3)
    for name in "abc":
        assert store.put(name, b"x") == "stored"
    assert store.get("a") == b"x"
    assert store.put("b", b"x") == "stored"
    store.put("d", b"x")
    assert store.has(["a", "b", "c", "d"]) == [True, True, False, True]
    store.put("e", b"x")
    assert store.has(["a", "b", "d", "e"]) == [False, True, True, True]


def test_an_object_larger_than_the_store_is_refused() -> None:
    store = MemoryStore(capacity_bytes=3)
    store.put("a", b"x")
    assert store.put("b", b"xxxx") == "full"
    assert store.has(["a", "b"]) == [True, False]
