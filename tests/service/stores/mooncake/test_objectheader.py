from __future__ import annotations

from kvstow_service.stores.mooncake.objectheader import HEADER_BYTES, find_mismatch, pack_header

SLOT = memoryview(bytes(range(256)) * 16)


def test_a_header_describes_its_slot() -> None:
    header = pack_header("f", "name", SLOT)
    assert len(header) == HEADER_BYTES
    assert find_mismatch(header, "f", "name", SLOT) is None


def test_each_part_is_compared() -> None:
    header = pack_header("f", "name", SLOT)
    other = memoryview(bytes(len(SLOT)))
    assert find_mismatch(header, "g", "name", SLOT) == "fingerprint"
    assert find_mismatch(header, "f", "eman", SLOT) == "name"
    assert find_mismatch(header, "f", "name", SLOT[:-1]) == "length"
    assert find_mismatch(header, "f", "name", other) == "checksum"


def test_every_bit_of_a_header_counts() -> None:
    header = pack_header("f", "name", SLOT)
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        assert find_mismatch(bytes(damaged), "f", "name", SLOT) in ("magic", "header")


def test_every_bit_of_a_slot_counts() -> None:
    header = pack_header("f", "name", SLOT)
    for at in (0, 1, len(SLOT) // 2, len(SLOT) - 1):
        damaged = bytearray(SLOT)
        damaged[at] ^= 0x80
        assert find_mismatch(header, "f", "name", memoryview(damaged)) == "checksum"
