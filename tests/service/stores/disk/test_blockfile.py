"""Blocks in the files of a path: nothing but what was written under a name is ever read under it."""

from __future__ import annotations

import os
from random import Random

import numpy as np
import pytest
from tests.service.stores.disk.fakefiles import PIECE, FakeFiles

from kvstow_service.stores.disk import diskformat
from kvstow_service.stores.disk.blockfile import BlockFile, BlockPart, boot_id, chunk_bytes_for
from kvstow_service.stores.disk.diskformat import ChunkEntry, FormatError, PlaceKind, name_digests
from kvstow_service.stores.disk.places import Assignment, BlockName, FoundChunk, Place

BOOT = b"b" * 16
SIZES = (5000, 4096)
PLACE_BYTES = 8192 + 4096
CHUNK_BYTES = 1 << 20
KIND = PlaceKind("1000", "identity", PLACE_BYTES)
SMALL = PlaceKind("1000", "identity", 4096)


def opened(files: FakeFiles, boot: bytes = BOOT, size: int | None = 2 * CHUNK_BYTES) -> BlockFile:
    return BlockFile.open(files, size, 0, PIECE, boot)


def assigned(files: FakeFiles) -> BlockFile:
    block_file = opened(files)
    block_file.assign(Assignment(0, KIND, 1))
    block_file.sync()
    return block_file


def place(index: int, generation: int = 1) -> Place:
    return Place(0, index, index * PLACE_BYTES, generation)


def name(number: int) -> BlockName:
    return BlockName(name_digests(7, [b"%d" % number])[0], 7, number)


def parts(value: int) -> list[BlockPart]:
    return [BlockPart(memoryview(bytearray([value % 251]) * size), used) for size, used in ((8192, 5000), (4096, 4096))]


def values_in(found: list[BlockPart]) -> set[int]:
    return {byte for part in found for byte in set(part.buffer[: part.num_bytes])}


def read(block_file: BlockFile, at: Place, number: int) -> tuple[str, set[int]]:
    into = parts(250)
    return block_file.read(at, name(number), into), values_in(into)


def digests_in(chunk: FoundChunk) -> dict[int, bytes]:
    return {
        int(index): chunk.digests[16 * at : 16 * at + 16] for at, index in enumerate(np.asarray(chunk.indices).tolist())
    }


def test_a_block_is_read_as_it_was_written_also_in_another_life() -> None:
    files = FakeFiles()
    assigned(files).write(place(3), name(1), parts(1))
    again = opened(files)
    (chunk,) = again.load().chunks
    assert digests_in(chunk) == {3: name(1).digest}
    assert chunk.assignment == Assignment(0, KIND, 1)
    assert read(again, place(3), 1) == ("read", {1})


def test_a_block_under_another_name_is_missing() -> None:
    block_file = assigned(FakeFiles())
    block_file.write(place(3), name(1), parts(1))
    assert read(block_file, place(3), 2)[0] == "missing"
    assert read(block_file, place(4), 1)[0] == "corrupt", "no record at all, where the index says that there is one"


@pytest.mark.parametrize("other", [name(1)._replace(namespace=8), name(1)._replace(key_start=2)])
def test_a_block_whose_name_only_has_an_equal_digest_is_missing(other: BlockName) -> None:
    """Engines choose the keys, and can find two keys that have one digest in two namespaces."""
    block_file = assigned(FakeFiles())
    block_file.write(place(3), name(1), parts(1))
    assert block_file.read(place(3), other, parts(0)) == "missing"


@pytest.mark.parametrize("at", [3 * PLACE_BYTES, 3 * PLACE_BYTES + 4999, 3 * PLACE_BYTES + 8192 + 17])
def test_a_flipped_bit_is_corruption(at: int) -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(3), name(1), parts(1))
    files.data[at] ^= 4
    assert read(block_file, place(3), 1)[0] == "corrupt"


def test_the_data_of_a_misdirected_write_is_found_out() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    for number in (1, 2):
        block_file.write(place(number), name(number), parts(1))  # equal bytes, under two names
    a, b = (diskformat.RECORD_BYTES * n + block_file.header.records_at(0) for n in (1, 2))
    files.records[b : b + 64], files.records[a : a + 64] = files.records[a : a + 64], files.records[b : b + 64]
    assert [read(block_file, place(number), number)[0] for number in (1, 2)] == ["corrupt", "corrupt"]


def test_a_process_that_is_killed_within_a_write_leaves_no_record() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(3), name(1), parts(1))

    def die(call: str) -> None:
        if call == "written_data":
            raise KeyboardInterrupt

    files.on_call = die
    with pytest.raises(KeyboardInterrupt):
        block_file.write(place(3), name(2), parts(2))
    files.on_call = lambda call: None
    (chunk,) = opened(files).load().chunks
    assert digests_in(chunk) == {}
    assert list(chunk.dirty) == [3], "the bytes of a block that nothing names are overwritten"


def test_what_was_read_from_slots_after_the_service_had_ended_is_not_found() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    assert not block_file.write(place(3), name(1), parts(1), lambda: False)
    (chunk,) = opened(files).load().chunks
    assert (digests_in(chunk), list(chunk.dirty)) == ({}, [3])


def test_nothing_of_a_purged_block_is_left() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    for number in range(4):
        block_file.write(place(number), name(number), parts(number + 1))
    block_file.mark_dirty([place(1), place(2)])
    after_a_kill = opened(files.power_cut(Random(1)))
    (chunk,) = after_a_kill.load().chunks
    assert {1, 2} <= set(chunk.dirty)
    block_file.overwrite([place(1), place(2)], PLACE_BYTES)
    held = set(files.data)
    assert {2, 3}.isdisjoint(held)
    assert {1, 4} <= held
    (chunk,) = block_file.load().chunks
    assert list(chunk.dirty) == []
    assert sorted(digests_in(chunk)) == [0, 3]


def test_a_chunk_that_moves_holds_nothing_of_before() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(1), name(1), parts(1))
    block_file.assign(Assignment(0, SMALL, 2))
    assert not any(files.data[:CHUNK_BYTES])
    (chunk,) = block_file.load().chunks
    assert (chunk.assignment, digests_in(chunk), list(chunk.dirty)) == (
        Assignment(0, SMALL, 2),
        {},
        [],
    )


def test_a_chunk_whose_move_was_interrupted_is_emptied_at_the_next_start() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(1), name(1), parts(1))

    def die(call: str) -> None:
        if call == "zero_data":
            raise KeyboardInterrupt

    files.on_call = die
    with pytest.raises(KeyboardInterrupt):
        block_file.assign(Assignment(0, SMALL, 2))
    files.on_call = lambda call: None
    found = opened(files).load()
    assert (found.chunks, found.header.chunks) == ([], {0: ChunkEntry(2, None)})
    assert not any(files.data)


def test_files_of_another_format_are_refused_and_left_alone() -> None:
    for content in (b"something else" * 1000, diskformat.MAGIC + b"\1\0\0\0" + bytes(5000)):
        files = FakeFiles()
        files.records = bytearray(content)
        with pytest.raises(FormatError):
            opened(files)
        assert files.records == content


def test_a_header_that_was_written_in_part_costs_nothing() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(1), name(1), parts(1))
    being_written = diskformat.HEADER_BYTES - block_file.header.at
    files.records[being_written + 8 : being_written + 40] = bytes(32)
    (chunk,) = opened(files).load().chunks
    assert digests_in(chunk) == {1: name(1).digest}


def test_the_header_has_room_for_as_many_kinds_as_chunks() -> None:
    random = Random(1)
    chunks = {
        chunk: ChunkEntry(random.getrandbits(32), PlaceKind(f"uid:{chunk}", f"{random.getrandbits(128):032x}", chunk))
        for chunk in range(diskformat.MOST_CHUNKS)
    }
    header = diskformat.Header(1, len(chunks), diskformat.CHUNK_BYTES, PIECE, 0, False, BOOT, chunks)
    assert len(header.pack()) <= diskformat.HEADER_BYTES


def test_times_of_last_use_order_what_is_found() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    for number in range(3):
        block_file.write(place(number), name(number), parts(1))
    block_file.write_uses(0, 1, (2**31).to_bytes(4, "little"))
    (chunk,) = block_file.load().chunks
    assert np.argmax(chunk.used_at) == 1


def test_the_size_can_change() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(1), name(1), parts(1))
    assert len(files.data) == 2 * CHUNK_BYTES
    grown = opened(files, size=5 * CHUNK_BYTES)
    assert len(files.data) == 5 * CHUNK_BYTES
    assert read(grown, place(1), 1) == ("read", {1})
    assert opened(files, size=None).header.num_chunks == 5
    assert opened(files, size=CHUNK_BYTES).header.num_chunks == 1
    assert len(files.data) == CHUNK_BYTES


def test_a_chunk_that_a_smaller_size_has_cut_off_comes_back_empty() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.assign(Assignment(1, KIND, 5))
    block_file.write(Place(1, 0, CHUNK_BYTES, 5), name(1), parts(1))
    opened(files, size=CHUNK_BYTES)
    found = opened(files, size=2 * CHUNK_BYTES).load()
    assert [one.assignment.chunk for one in found.chunks] == [0]
    assert found.header.chunks[1] == ChunkEntry(5, None), "records of before stay those of a former generation"


def test_a_clean_end_makes_a_power_cut_lose_nothing() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(1), name(1), parts(1))
    block_file.close()
    again = opened(files.power_cut(Random(1)), boot=b"c" * 16)
    assert again.header.epoch == 0
    assert not again.header.is_clean
    assert opened(files, boot=b"d" * 16).header.epoch == 0


def test_what_a_power_cut_left_half_written_is_no_corruption_and_what_was_written_since_is() -> None:
    files = FakeFiles()
    block_file = assigned(files)
    block_file.write(place(1), name(1), parts(1))
    files.data[PLACE_BYTES] ^= 1
    assert read(block_file, place(1), 1)[0] == "corrupt"
    after = opened(files, boot=b"c" * 16)
    assert read(after, place(1), 1)[0] == "missing"
    after.write(place(2), name(2), parts(2))
    files.data[2 * PLACE_BYTES] ^= 1
    assert read(after, place(2), 2)[0] == "corrupt"


@pytest.mark.parametrize("seeds", [range(250), range(250, 500), range(500, 750), range(750, 1000)])
def test_a_power_cut_never_gives_wrong_bytes(seeds: range) -> None:
    """Any subset of what was not synced may be lost, reordered. What was synced and not touched since is found."""
    for seed in seeds:
        random = Random(seed)
        files = FakeFiles()
        block_file = assigned(files)
        truth: dict[int, int] = {}
        safe: dict[int, int] = {}
        generation = 1
        for number in range(random.randrange(1, 40)):
            index, doing = random.randrange(12), random.random()
            if doing < 0.8:
                block_file.write(place(index, generation), name(number), parts(number + 1))
                truth[index] = number
                safe.pop(index, None)
            elif doing < 0.88:
                block_file.mark_dirty([place(index, generation)])
                truth.pop(index, None)
                safe.pop(index, None)
            elif doing < 0.92:
                generation += 1
                block_file.assign(Assignment(0, KIND, generation))
                truth, safe = {}, {}
            else:
                block_file.sync()
                safe = dict(truth)
        after = opened(files.power_cut(random), boot=b"c" * 16)
        (chunk,) = after.load().chunks
        assert chunk.assignment.generation == generation
        found = digests_in(chunk)
        numbers = {name(number).digest: number for number in range(40)}
        for index, digest in found.items():
            number = numbers[digest]
            result, values = read(after, place(index, generation), number)
            assert (result == "read" and values == {number + 1}) or result == "missing", (seed, index, result)
        for index, number in safe.items():
            assert read(after, place(index, generation), number) == ("read", {number + 1}), (seed, index)
        assert set(range(CHUNK_BYTES // PLACE_BYTES)) == set(found) | set(chunk.dirty), "nothing stays unseen"


def test_purged_blocks_stay_purged_after_a_power_cut() -> None:
    for seed in range(200):
        random, files = Random(seed), FakeFiles()
        block_file = assigned(files)
        for number in range(6):
            block_file.write(place(number), name(number), parts(number + 1))
        block_file.mark_dirty([place(2), place(3)])
        block_file.write(place(2), name(9), parts(9))
        after = opened(files.power_cut(random), boot=b"c" * 16)
        (chunk,) = after.load().chunks
        assert {name(2).digest, name(3).digest}.isdisjoint(digests_in(chunk).values()), seed


def test_small_disks_have_small_chunks() -> None:
    assert chunk_bytes_for(2 << 40, PIECE) == 1 << 30
    assert chunk_bytes_for(1 << 30, PIECE) == 1 << 24
    assert chunk_bytes_for(1 << 20, PIECE) == 1 << 20


def test_the_boot_is_known() -> None:
    assert len(boot_id()) == 16
    assert os.path.exists("/proc/sys/kernel/random/boot_id")
