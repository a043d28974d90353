"""What the clients of a store must do. A store's tests subclass `ClientContract` with a fixture `tier`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from kvstow.errors import InvalidRequestError, TierUnavailableError
from kvstow.keys import make_key
from kvstow.memfd import create_memfd
from kvstow_service.stores.mooncake.objects import (
    MAX_BATCH_OBJECTS,
    LookupClient,
    MemoryRange,
    MooncakeClients,
    ObjectName,
    SlotObject,
    TransferClient,
)

TIMEOUT = 30.0
SLOT = 8192
NUM_SLOTS = 2 * MAX_BATCH_OBJECTS

WITNESS = os.open(os.devnull, os.O_WRONLY)
"""See `BlockStore.start`."""

_fingerprints, _range_ids = count(1), count(1)


class Slots:
    """Slots of `SLOT` bytes in one memory range, each filled with a byte of its own."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        size = num_slots * SLOT
        self.fd = create_memfd("kvstow-tier-test", size)
        self._map = mmap.mmap(self.fd, size)
        self.range = MemoryRange(next(_range_ids), size, self.fd)
        for slot in range(num_slots):
            self.fill(slot, slot % 251)

    def fill(self, slot: int, value: int) -> None:
        self._map[slot * SLOT : (slot + 1) * SLOT] = bytes([value]) * SLOT

    def read(self, slot: int) -> bytes:
        return self._map[slot * SLOT : (slot + 1) * SLOT]

    def object(self, name: ObjectName, slot: int, num_bytes: int = SLOT) -> SlotObject:
        return SlotObject(name, self.range.range_id, slot * SLOT, num_bytes)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


class ClientContract:
    """`tier` gives a store with at least 64 MiB of room. Each test uses a fingerprint of its own."""

    @pytest.fixture
    def tier(self) -> MooncakeClients:
        raise NotImplementedError

    @pytest.fixture
    def slots(self) -> Iterator[Slots]:
        slots = Slots()
        yield slots
        slots.close()

    @pytest.fixture
    def transfers(self, tier: MooncakeClients, slots: Slots) -> Iterator[TransferClient]:
        client = tier.open_transfers(WITNESS)
        client.add_memory(slots.range)
        yield client
        client.close()

    @pytest.fixture
    def lookups(self, tier: MooncakeClients) -> Iterator[LookupClient]:
        client = tier.open_lookups()
        yield client
        client.close()

    @pytest.fixture
    def name(self) -> Callable[..., ObjectName]:
        fingerprint = f"{os.getpid():08x}{next(_fingerprints):08x}"

        def make(number: int, *, rank: int = 0, num_ranks: int = 2, fingerprint: str = fingerprint) -> ObjectName:
            return ObjectName(fingerprint, make_key(0, number.to_bytes(32, "big")), rank, num_ranks)

        return make

    def test_what_was_put_is_found_in_other_slots(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        puts = [slots.object(name(number), number) for number in range(MAX_BATCH_OBJECTS)]
        assert transfers.put(puts, TIMEOUT) == ["stored"] * MAX_BATCH_OBJECTS
        gets = [slots.object(name(number), NUM_SLOTS - 1 - number) for number in range(MAX_BATCH_OBJECTS)]
        assert transfers.get(gets, TIMEOUT) == ["found"] * MAX_BATCH_OBJECTS
        for number in range(MAX_BATCH_OBJECTS):
            assert slots.read(NUM_SLOTS - 1 - number) == slots.read(number) == bytes([number]) * SLOT

    def test_statuses_are_in_the_order_of_the_objects(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        transfers.put([slots.object(name(number), number) for number in (1, 3)], TIMEOUT)
        gets = [slots.object(name(number), 64 + number) for number in range(5)]
        assert transfers.get(gets, TIMEOUT) == ["missing", "found", "missing", "found", "missing"]
        assert slots.read(65) == slots.read(1)
        assert slots.read(67) == slots.read(3)

    def test_a_slot_is_the_callers_again_after_a_put(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        transfers.put([slots.object(name(1), 1)], TIMEOUT)
        slots.fill(1, 0xEE)
        transfers.get([slots.object(name(1), 2)], TIMEOUT)
        assert slots.read(2) == bytes([1]) * SLOT

    def test_an_object_keeps_its_bytes_when_it_is_put_again(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        assert transfers.put([slots.object(name(1), 1)], TIMEOUT) == ["stored"]
        assert transfers.put([slots.object(name(1), 2)], TIMEOUT) == ["stored"]
        transfers.get([slots.object(name(1), 3)], TIMEOUT)
        assert slots.read(3) == bytes([1]) * SLOT

    def test_ranks_groups_and_fingerprints_are_parts_of_a_name(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        block_hash = bytes(range(32))
        names = [
            name(1)._replace(key=make_key(group, block_hash), rank=rank, fingerprint=fingerprint)
            for group in (0, 7)
            for rank in (0, 1)
            for fingerprint in (name(1).fingerprint, f"{name(1).fingerprint}a")
        ]
        transfers.put([slots.object(one, slot) for slot, one in enumerate(names)], TIMEOUT)
        transfers.get([slots.object(one, 64 + slot) for slot, one in enumerate(names)], TIMEOUT)
        assert [slots.read(64 + slot)[0] for slot in range(8)] == list(range(8))

    def test_another_length_is_not_found(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        transfers.put([slots.object(name(1), 1), slots.object(name(2), 2, SLOT // 2)], TIMEOUT)
        gets = [slots.object(name(1), 3, SLOT // 2), slots.object(name(2), 4)]
        assert "found" not in transfers.get(gets, TIMEOUT)

    def test_lookups_answer_in_order(
        self, transfers: TransferClient, lookups: LookupClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        transfers.put([slots.object(name(number), number) for number in (0, 2)], TIMEOUT)
        assert lookups.exists([name(2), name(1), name(0)], TIMEOUT) == [True, False, True]
        assert lookups.exists([name(0, rank=1), name(0, num_ranks=1)], TIMEOUT) == [False, False]
        assert lookups.exists([], TIMEOUT) == []

    def test_many_names_in_one_lookup(
        self, transfers: TransferClient, lookups: LookupClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        transfers.put([slots.object(name(999), 1)], TIMEOUT)
        found = lookups.exists([name(number) for number in range(2000)], TIMEOUT)
        assert [number for number, there in enumerate(found) if there] == [999]

    def test_memory_that_was_not_added_is_refused_before_anything_is_touched(
        self, transfers: TransferClient, lookups: LookupClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        last = slots.object(name(2), NUM_SLOTS - 1)
        outside = [
            last._replace(offset=last.offset + 1),  # one byte beyond the end
            last._replace(offset=-1),
            last._replace(num_bytes=0),
            last._replace(range_id=-1),
        ]
        for wrong in outside:
            with pytest.raises(InvalidRequestError):
                transfers.put([slots.object(name(1), 1), wrong], TIMEOUT)
            with pytest.raises(InvalidRequestError):
                transfers.get([slots.object(name(1), 1), wrong], TIMEOUT)
        assert lookups.exists([name(1)], TIMEOUT) == [False]

    def test_a_range_that_is_removed_is_refused(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        more = Slots(4)
        try:
            transfers.add_memory(more.range)
            assert transfers.put([more.object(name(1), 1), slots.object(name(3), 3)], TIMEOUT) == ["stored"] * 2
            assert transfers.get([more.object(name(3), 0)], TIMEOUT) == ["found"]
            assert more.read(0) == slots.read(3)
            transfers.remove_memory(more.range.range_id)
            with pytest.raises(InvalidRequestError):
                transfers.get([more.object(name(3), 3)], TIMEOUT)
            assert transfers.get([slots.object(name(1), 1)], TIMEOUT) == ["found"]
        finally:
            more.close()

    def test_a_closed_client_moves_nothing(
        self, tier: MooncakeClients, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        transfers, lookups = tier.open_transfers(WITNESS), tier.open_lookups()
        transfers.add_memory(slots.range)
        for client in (transfers, lookups, transfers, lookups):
            client.close()
        assert transfers.health().state == lookups.health().state == "closed"
        for call in (transfers.put, transfers.get):
            with pytest.raises(TierUnavailableError):
                call([slots.object(name(1), 1)], TIMEOUT)
        with pytest.raises(TierUnavailableError):
            lookups.exists([name(1)], TIMEOUT)
