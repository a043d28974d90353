import pytest
import torch

from kvstow.keys import make_key
from kvstow_service.replay.pattern import PatternedKV

KEYS = [make_key(0, bytes([number]) * 32) for number in range(3)]


def make_kv(page_bytes: int, *, ranks: int = 2, padding: int = 0) -> tuple[PatternedKV, list[list[torch.Tensor]]]:
    regions = [
        [torch.zeros((4, page_bytes + padding), dtype=torch.uint8)[:, :page_bytes] for _ in range(2)]
        for _ in range(ranks)
    ]
    return PatternedKV(regions), regions


@pytest.mark.parametrize("page_bytes", [1, 7, 8, 64, 1001])
@pytest.mark.parametrize("padding", [0, 3])
def test_every_single_byte_is_checked(page_bytes: int, padding: int) -> None:
    kv, regions = make_kv(page_bytes, padding=padding)
    kv.compute(KEYS, [3, 0, 2])
    assert kv.verify(KEYS, [3, 0, 2]).mismatches == []
    for byte in {0, page_bytes // 2, page_bytes - 1}:
        regions[1][1][0, byte] ^= 1
        assert [(wrong.rank, wrong.region, wrong.block) for wrong in kv.verify(KEYS, [3, 0, 2]).mismatches] == [
            (1, 1, 0)
        ]
        regions[1][1][0, byte] ^= 1


def test_no_place_holds_the_bytes_of_another() -> None:
    kv, regions = make_kv(64)
    kv.compute(KEYS, [0, 1, 2])
    pages = {region[block].numpy().tobytes() for rank in regions for region in rank for block in range(3)}
    assert len(pages) == 2 * 2 * 3


def test_bytes_that_moved_within_a_page_are_wrong() -> None:
    kv, regions = make_kv(64)
    kv.compute(KEYS[:1], [0])
    regions[0][0][0].copy_(regions[0][0][0].roll(8))
    assert len(kv.verify(KEYS[:1], [0]).mismatches) == 1


def test_scrubbed_blocks_are_wrong_on_every_rank() -> None:
    kv, _ = make_kv(16)
    kv.compute(KEYS, [0, 1, 2])
    kv.scrub([1])
    assert {(wrong.rank, wrong.block) for wrong in kv.verify(KEYS, [0, 1, 2]).mismatches} == {(0, 1), (1, 1)}


def test_verified_bytes_are_of_all_regions_and_ranks() -> None:
    kv, _ = make_kv(10, ranks=3)
    assert kv.verify(KEYS, [0, 1, 2]).num_bytes == 3 * 10 * 2 * 3
