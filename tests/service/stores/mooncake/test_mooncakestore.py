from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.service.stores.mooncake.clientcontract import NUM_SLOTS, SLOT, TIMEOUT, ClientContract, Slots
from tests.service.stores.mooncake.cluster import Cluster

from kvstow_service.stores.mooncake.mooncakestore import MooncakeStore
from kvstow_service.stores.mooncake.objects import MooncakeClients, ObjectName, TransferClient

STAGED_BYTES = 256 << 10  # `objectbuffers.STAGED_BYTES`, which only a child imports

pytestmark = pytest.mark.tier


class TestMooncakeStore(ClientContract):
    @pytest.fixture
    def tier(self, shared_cluster: Cluster) -> MooncakeClients:
        return MooncakeStore(shared_cluster.location)

    def test_small_and_large_objects_in_one_batch(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        """Small slots are copied in the child; large ones are moved from where they are."""
        sizes = [STAGED_BYTES - SLOT, STAGED_BYTES, STAGED_BYTES + SLOT, SLOT, 1, STAGED_BYTES + 1]
        firsts = [0, 3, 31, 30, 31, 30]
        puts = [slots.object(name(at), first, size) for at, (first, size) in enumerate(zip(firsts, sizes, strict=True))]
        assert transfers.put(puts, TIMEOUT) == ["stored"] * len(puts)
        for at, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            before = [slots.read(slot) for slot in range(NUM_SLOTS)]
            assert transfers.get([slots.object(name(at), 64 + first, size)], TIMEOUT) == ["found"]
            whole = b"".join(before)
            end = 64 * SLOT + first * SLOT + size
            expected = whole[: end - size] + whole[first * SLOT : first * SLOT + size] + whole[end:]
            assert b"".join(slots.read(slot) for slot in range(NUM_SLOTS)) == expected
        apart = [slots.object(name(at), 64 + firsts[at], sizes[at]) for at in (0, 2)]
        assert transfers.get(apart, TIMEOUT) == ["found", "found"]
