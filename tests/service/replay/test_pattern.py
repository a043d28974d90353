"""The KV caches of known content."""

import numpy as np
import pytest
from tests.embeddedreplay import LocalRanks

from kvstow.keys import make_key
from kvstow_service.replay.kv import HostKV, Page

KEYS = [make_key(0, bytes([number]) * 32) for number in range(3)]


def regions_of(page_bytes: int, padding: int = 0) -> list[Page]:
    return [np.zeros((4, page_bytes + padding), np.uint8)[:, :page_bytes] for _ in range(2)]


@pytest.mark.parametrize("page_bytes", [1, 7, 8, 64, 1001])
@pytest.mark.parametrize("padding", [0, 3])
def test_every_single_byte_is_checked(page_bytes: int, padding: int) -> None:
    regions = regions_of(page_bytes, padding)
    kv = HostKV(1, regions)
    kv.write(KEYS, [3, 0, 2])
    assert kv.check(KEYS, [3, 0, 2]).mismatches == ()
    for byte in {0, page_bytes // 2, page_bytes - 1}:
        regions[1][0, byte] ^= 1
        (wrong,) = kv.check(KEYS, [3, 0, 2]).mismatches
        assert wrong.endswith("in block 0, region 1 of rank 1")
        regions[1][0, byte] ^= 1


def test_no_place_holds_the_bytes_of_another() -> None:
    ranks = [regions_of(64) for _ in range(2)]
    for rank, regions in enumerate(ranks):
        HostKV(rank, regions).write(KEYS, [0, 1, 2])
    pages = {region[block].tobytes() for regions in ranks for region in regions for block in range(3)}
    assert len(pages) == 2 * 2 * 3


def test_bytes_that_moved_within_a_page_are_wrong() -> None:
    regions = regions_of(64)
    kv = HostKV(0, regions)
    kv.write(KEYS[:1], [0])
    regions[0][0] = np.roll(regions[0][0], 8)
    assert len(kv.check(KEYS[:1], [0]).mismatches) == 1


def test_scrubbed_blocks_are_wrong_on_every_rank() -> None:
    kv = LocalRanks((), [HostKV(rank, regions_of(16)) for rank in range(2)])
    kv.compute(KEYS, [0, 1, 2])
    kv.scrub([1])
    kv.verify(KEYS, [0, 1, 2])
    found = kv.take_verifications()
    places = [wrong.partition(" in ")[2] for one in found for wrong in one.mismatches]
    assert places == ["block 1, region 0 of rank 0", "block 1, region 0 of rank 1"]
    assert kv.take_verifications() == []


def test_checked_bytes_are_those_of_all_regions() -> None:
    assert HostKV(0, regions_of(10)).check(KEYS, [0, 1, 2]).num_bytes == 10 * 2 * 3
