"""The JAX device under a data plane, on one and on four devices of the CPU backend."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.jax.rank import DEADLINE, JaxRank, mesh

from kvstow.devices.jax import ArrayCell, JaxDevice, JaxOptions, ShardedKV, device, deviceloads, devicestores
from kvstow.devices.jax.devicestores import DeviceStores, StoreTicket
from kvstow.devices.jax.hostcopies import CopyJob, RangeCopier, wait_until
from kvstow.devices.jax.programs import DevicePrograms, buckets_up_to, copies_rows, pieces_of
from kvstow.errors import ConfigError, CopyError
from kvstow.messages import LoadLaunch, Op, StepPlan

pytestmark = pytest.mark.jax

MakeRank = Callable[..., JaxRank]
of_both_memories = pytest.mark.parametrize("host_memory", ["plain", "pinned"])
DEVICES = len(jax.devices())
BUFFERS = 8
"""How many loads of one size a device has memory for."""


@pytest.fixture(scope="module")
def shared_ranks() -> Iterator[dict[str, JaxRank]]:
    """By host memory, for tests that leave them as they were: making one takes a second."""
    ranks = {host_memory: JaxRank(host_memory=host_memory) for host_memory in ("plain", "pinned")}
    yield ranks
    for rank in ranks.values():
        rank.close()


def check_round_trip(rank: JaxRank, blocks: Sequence[int], targets: Sequence[int]) -> None:
    """Store these blocks, have the model write them, and load what was stored to the targets."""
    before = rank.blocks(blocks)
    rank.done(rank.store(blocks, blocks))
    rank.overwrite(blocks)
    rank.done(rank.load(targets, blocks))
    rank.put(targets, before)
    assert rank.wrong_elements() == 0


@of_both_memories
@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_any_layout_survive_a_store_and_a_load(make_rank: MakeRank, host_memory: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    layers = [
        (
            int(random.integers(1, 6)),
            DEVICES * int(random.integers(1, 4)),
            *random.integers(1, 9, random.integers(0, 3)),
        )
        for _ in range(random.integers(1, 5))
    ]
    rank = make_rank(
        layers=layers,
        num_blocks=int(random.integers(3, 40)),
        num_slots=40,
        dtype=[np.uint8, np.uint16, np.int32][seed % 3],
        seed=seed,
        host_memory=host_memory,
    )
    stored: dict[int, list[np.ndarray]] = {}
    for _ in range(8):
        count = int(random.integers(1, rank.num_blocks + 1))
        blocks, slots = random.permutation(rank.num_blocks)[:count].tolist(), random.permutation(40)[:count].tolist()
        stored |= {slot: rank.blocks([block]) for block, slot in zip(blocks, slots, strict=True)}
        rank.done(rank.store(blocks, slots))
        rank.overwrite(random.permutation(rank.num_blocks)[:5].tolist())
        chosen = random.permutation(list(stored))[: rank.num_blocks].tolist()
        targets = random.permutation(rank.num_blocks)[: len(chosen)].tolist()
        rank.done(rank.load(targets, chosen))
        for slot, target in zip(chosen, targets, strict=True):
            rank.put([target], stored[slot])
        assert rank.wrong_elements() == 0


def test_a_slot_holds_the_parts_of_the_devices_one_after_the_other(make_rank: MakeRank) -> None:
    rank = make_rank(layers=[(2, 8), (1, 4, 3)])
    rank.done(rank.store([5], [7]))
    parts = [np.split(layer[0], DEVICES, axis=1) for layer in rank.blocks([5])]
    expected = b"".join(layer[device].tobytes() for device in range(DEVICES) for layer in parts)
    assert rank.slot(7) == expected
    names = [region.name for region in ShardedKV.of(rank.cell.peek()).layout.regions]
    assert names == [f"{device.id}/{layer}" for device in jax.devices() for layer in range(2)]


@of_both_memories
def test_the_very_next_program_may_overwrite_the_blocks_of_a_store(make_rank: MakeRank, host_memory: str) -> None:
    rank = make_rank(host_memory=host_memory)
    blocks = list(range(24))
    for _ in range(20):
        rank.overwrite(blocks)
        before = rank.blocks(blocks)
        op = rank.store(blocks, range(24))
        rank.overwrite(blocks)
        rank.overwrite(blocks)
        rank.done(op)
        rank.done(rank.load(blocks, range(24)))
        rank.put(blocks, before)
        assert rank.wrong_elements() == 0


@of_both_memories
def test_a_load_writes_after_older_steps_and_before_later_ones(make_rank: MakeRank, host_memory: str) -> None:
    rank = make_rank(host_memory=host_memory)
    before = rank.blocks([3, 4])
    rank.done(rank.store([3, 4], [0, 1]))
    for _ in range(20):
        op = rank.load([8, 9], [0, 1])
        rank.overwrite([8, 9])  # an older step: the load is not launched yet
        rank.put([8, 9], before)
        rank.wait_until(partial(rank.has_staged, op))
        rank.turn()
        rank.overwrite([9])
        rank.done(op)
        assert rank.wrong_elements() == 0


@of_both_memories
@pytest.mark.parametrize("count", range(1, 12))
def test_padding_touches_no_block_and_no_slot(shared_ranks: dict[str, JaxRank], host_memory: str, count: int) -> None:
    rank = shared_ranks[host_memory]
    blocks, slots = list(range(23, 23 - count, -1)), list(range(1, 1 + count))
    for slot in range(32):
        rank.scribble(slot)
    before = rank.blocks(blocks)
    rank.done(rank.store(blocks, slots))
    assert all(rank.slot(slot) == b"\xa5" * rank.slot_bytes for slot in range(32) if slot not in slots)
    rank.done(rank.load(range(count), slots))
    rank.put(range(count), before)
    assert rank.wrong_elements() == 0


@of_both_memories
def test_the_memory_of_the_pool_is_never_an_array_of_jax(make_rank: MakeRank, host_memory: str) -> None:
    """JAX on the CPU uses aligned numpy memory in place: then a slot that is reused would change the KV cache."""
    rank = make_rank(layers=[(4, 4, 64)], host_memory=host_memory)
    before = rank.blocks([3, 4, 5, 6])
    rank.done(rank.store([3, 4, 5, 6], [0, 1, 2, 3]))
    op = rank.load([7, 8, 9, 10], [0, 1, 2, 3])
    rank.wait_until(lambda: rank.has_staged(op))
    for slot in range(4):
        rank.scribble(slot)
    rank.done(op)
    rank.put([7, 8, 9, 10], before)
    assert rank.wrong_elements() == 0


@of_both_memories
def test_a_buffer_is_written_again_only_when_no_program_reads_it(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, host_memory: str
) -> None:
    witness = Witness()
    with_witness(monkeypatch, witness)
    rank = make_rank(host_memory=host_memory)
    contents = rank.blocks(range(24))
    rank.done(rank.store(range(24), range(24)))
    rank.overwrite(range(24))
    loads = [rank.load([block], [23 - block]) for block in range(24)]  # more than there are buffers
    launched = launches(monkeypatch)
    rank.wait_until(lambda: len(launched) >= BUFFERS, rank.turn)
    rank.done(rank.store([5], [30]))  # the copy thread has made turns meanwhile
    rank.turn()
    assert launched == [*(("scatter", (block,)) for block in range(BUFFERS)), ("gather", (5,))]
    witness.ready = True
    rank.done(*loads)
    rank.put(range(24), [content[::-1] for content in contents])
    assert rank.wrong_elements() == 0


def test_a_load_is_written_in_place(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.done(rank.store([1], [1]))
    rank.overwrite([])

    def places() -> list[int]:
        return [shard.data.unsafe_buffer_pointer() for array in rank.cell.peek() for shard in array.addressable_shards]

    before = places()
    rank.done(rank.load([2], [1]))
    assert places() == before


def test_nothing_is_compiled_after_the_registration_and_16_programs_on_a_device_are_enough(
    make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvstow.jax"):
        rank = make_rank(num_blocks=300, layers=[(1, 4)], num_slots=300, piece_bytes=1 << 20)
    programs = 8 if copies_rows(rank.kv) else 16
    assert f"compiled {programs} programs for each of {DEVICES} devices" in caplog.text
    rank.overwrite([1])
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for count in (1, 2, 3, 50, 256, 300):
        rank.done(rank.store(range(count), range(count)))
        rank.done(rank.load(range(count), range(count)))
    assert rank.wrong_elements() == 0
    assert compiled == []
    jax.jit(lambda number: number + len(compiled))(1)
    assert compiled  # the listener hears compilations


@pytest.mark.parametrize(
    ("most", "expected", "pads_free"),
    [
        (1, (1,), (1,)),
        (5, (1, 2, 4), (1, 4)),
        (8, (1, 2, 4, 8), (2, 8)),
        (300, (2, 4, 8, 16, 32, 64, 128, 256), (4, 16, 64, 256)),
    ],
)
def test_buckets_are_powers_of_two_and_at_most_eight(
    most: int, expected: tuple[int, ...], pads_free: tuple[int, ...]
) -> None:
    assert buckets_up_to(most) == expected
    assert buckets_up_to(most, pads_free=True) == pads_free


# -- which thread ---------------------------------------------------------------------------------------------


def test_another_thread_may_not_launch(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.done(rank.store([1], [1]))
    load = rank.load([2], [1])
    rank.wait_until(lambda: rank.has_staged(load))
    before = rank.cell.peek()

    def work() -> None:
        rank.plane.submit(StepPlan((Op(101, "store", (1,), (1,)), Op(102, "load", (1,), (1,)))))
        rank.turn()
        for call in (lambda: rank.device.gather([1]), lambda: rank.device.expect(103, 1)):
            with pytest.raises(CopyError, match="thread other_0 may not launch programs"):
                call()

    with ThreadPoolExecutor(1, "other") as other:
        other.submit(work).result()
    for op in (load, Op(101, "store", (), ()), Op(102, "load", (), ())):
        assert "may not launch" in rank.failure(op)
    assert rank.cell.peek() is before


def test_a_host_that_has_changed_its_thread_launches_there(make_rank: MakeRank) -> None:
    """Ray registers the KV cache on one thread, and makes steps on another."""
    rank = make_rank()

    def work() -> None:
        rank.device.follow_host()
        check_round_trip(rank, [3], [3])

    with ThreadPoolExecutor(1) as other:
        other.submit(work).result()
    with pytest.raises(CopyError, match="MainThread may not launch programs"):
        rank.device.gather([1])


_HARMLESS = {"block_until_ready", "tree_leaves", "try_to_block", "shape", "_xla_gc_callback"}


@of_both_memories
def test_no_other_thread_gives_jax_work(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, host_memory: str) -> None:
    """In either direction. Whatever gives work begins with a function of JAX that is written in Python."""
    called: set[str] = set()
    threads: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        thread = threading.current_thread().name
        if event == "call" and not thread.startswith("kvstow-compile"):
            threads.add(thread.split("_")[0])
            if frame.f_globals.get("__name__", "").split(".")[0] in ("jax", "jaxlib"):
                called.add(frame.f_code.co_name)

    threading.setprofile(note)
    try:
        rank = make_rank(host_memory=host_memory, layers=[(16, 16, 128)] * 4, piece_bytes=2 << 20)
        for _ in range(3):
            check_round_trip(rank, range(24), range(24))
    finally:
        threading.setprofile(None)
    assert {"kvstow-copy-0", "kvstow-memcpy"} <= threads
    assert called <= _HARMLESS


def test_where_jax_does_not_tell_addresses_the_host_s_thread_asks_for_the_bytes(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    array_type = type(jax.numpy.zeros(1))
    original = array_type.copy_to_host_async

    def copy(self: Any) -> None:
        asked.append(threading.current_thread().name)
        original(self)

    monkeypatch.setattr(array_type, "copy_to_host_async", copy)
    monkeypatch.setattr(
        device, "DeviceStores", lambda *parts, **how: DeviceStores(*parts, **how | {"addressable": False})
    )
    check_round_trip(make_rank(host_memory="pinned"), [1, 2], [3, 4])
    assert asked == [threading.current_thread().name] * DEVICES


def test_launches_follow_the_order_of_the_plans(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is staged first."""
    launched = launches(monkeypatch)
    rank = make_rank()
    rank.done(rank.store(range(24), range(24)))
    launched.clear()
    stores = [rank.store([block], [24 + block % 8]) for block in (9, 3, 7, 1)]
    assert launched == [("gather", (9,)), ("gather", (3,)), ("gather", (7,)), ("gather", (1,))]
    rank.done(*stores)
    launched.clear()
    loads = [rank.load([block], [block]) for block in (20, 11, 15, 2)]
    rank.wait_until(lambda: rank.has_staged(*loads[:2]))
    assert launched == []  # not before the host's turn
    rank.done(*loads)
    assert launched == [("scatter", (20,)), ("scatter", (11,)), ("scatter", (15,)), ("scatter", (2,))]


# -- one order on all hosts -----------------------------------------------------------------------------------


def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What is launched from now on, on the first device: which program, and its blocks."""
    launched: list[tuple[str, tuple[int, ...]]] = []
    for name in ("gather", "scatter"):
        original = getattr(DevicePrograms, name)

        def spy(self: Any, shards: Any, blocks: Any, *rest: Any, name: str = name, original: Any = original) -> Any:
            if self.device == jax.devices()[0]:
                launched.append((name, tuple(blocks)))
            return original(self, shards, blocks, *rest)

        monkeypatch.setattr(DevicePrograms, name, spy)
    return launched


class Gate:
    """Holds all copies. It opens when the host's thread has begun to wait, or with `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_waited = False
        self._may_copy = threading.Event()
        start = RangeCopier.start

        def gated(copier: RangeCopier, ranges: Any) -> CopyJob:
            assert self._may_copy.wait(DEADLINE)
            return start(copier, ranges)

        monkeypatch.setattr(RangeCopier, "start", gated)
        for module in (deviceloads, devicestores):
            monkeypatch.setattr(module, "wait_until", self._wait_until)

    def _wait_until(self, condition: Callable[[], bool], stopping: threading.Event) -> bool:
        if condition():
            return True
        self.has_waited = True
        self.open()
        return wait_until(condition, stopping)

    def open(self) -> None:
        self._may_copy.set()


def test_a_load_that_is_not_ready_is_waited_for_in_the_step_that_names_it(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches(monkeypatch)
    rank = make_rank()
    before = rank.blocks([1, 2])
    rank.done(rank.store([1, 2], [1, 2]))
    launched.clear()
    gate = Gate(monkeypatch)
    op = rank.load([3, 4], [1, 2])
    rank.plane.submit(StepPlan(launches=(LoadLaunch(op.op_id, 2, 0, 1),)))
    assert gate.has_waited
    assert launched == [("scatter", (3, 4))]
    rank.done(op)
    rank.put([3, 4], before)
    assert rank.wrong_elements() == 0


def test_a_store_beyond_the_memory_in_flight_is_waited_for_in_its_step(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches(monkeypatch)
    rank = make_rank(bytes_in_flight=1)  # a piece at a time, though each is larger than that
    before = rank.blocks(range(24))
    gate = Gate(monkeypatch)
    op = rank.store(range(24), range(24))
    assert gate.has_waited
    assert len(launched) == 6
    rank.overwrite(range(24))
    rank.done(op)
    rank.done(rank.load(range(24), range(24)))
    rank.put(range(24), before)
    assert rank.wrong_elements() == 0


def test_a_load_that_fails_here_is_launched_and_writes_nothing(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    rank.done(rank.store(range(8), range(8)))
    launched = launches(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(RangeCopier, "start", lambda *_: 1 // 0)
        failed = rank.load(range(8, 16), range(8))
        assert "ZeroDivisionError" in rank.failure(failed)
    assert launched == []
    unknown = LoadLaunch(1000, 3, 0, 1)  # of an earlier boot
    rank.plane.submit(StepPlan(launches=(LoadLaunch(failed.op_id, 8, 0, 2), unknown)))
    assert launched == [("scatter", ())] * 3
    assert rank.wrong_elements() == 0
    before = rank.blocks([1])
    rank.done(rank.load([9], [1]))
    rank.put([9], before)
    assert rank.wrong_elements() == 0


def test_a_store_that_fails_here_is_gathered(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank(bytes_in_flight=1)
    launched = launches(monkeypatch)
    assert "slot 32 is not pinned" in rank.failure(rank.store(range(8), range(25, 33)))
    assert launched == [("gather", (0, 1, 2, 3)), ("gather", (4, 5, 6, 7))]
    launched.clear()
    boots = ("before",)
    refused = Op(50, "store", (3, 1), (1, 2), boots), Op(51, "load", (4,), (3,), boots)
    rank.plane.submit(StepPlan(refused))
    assert launched == [("gather", (3, 1))]
    rank.done(rank.store([1], [1]))


def test_a_data_plane_that_was_closed_launches_what_the_others_do(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    rank.done(rank.store(range(8), range(8)))
    load = rank.load([9], [1])
    rank.wait_until(lambda: rank.has_staged(load))
    rank.plane.close()
    launched = launches(monkeypatch)
    store = Op(60, "store", (3, 1), (1, 2))
    rank.plane.submit(StepPlan((store,), (LoadLaunch(load.op_id, 1, 0, 1),)))
    assert launched == [("scatter", ()), ("gather", (3, 1))]
    assert "closed" in rank.failure(store)
    assert "closed" in rank.failure(load)
    assert rank.wrong_elements() == 0


# -- memory in flight -----------------------------------------------------------------------------------------


def test_the_first_pieces_of_a_long_op_are_smaller() -> None:
    assert [len(piece) for piece in pieces_of(75, 16)] == [4, 4, 8, 16, 16, 16, 11]
    for num_blocks in range(70):
        for most in (1, 2, 4, 8, 16, 32):
            pieces = pieces_of(num_blocks, most)
            assert [block for piece in pieces for block in piece] == list(range(num_blocks))
            assert all(0 < len(piece) <= most for piece in pieces)
            assert len(pieces) <= -(-num_blocks // most) + 2
            if num_blocks <= most:
                assert len(pieces) <= 1


@of_both_memories
def test_a_long_op_of_pieces_that_differ_comes_back(make_rank: MakeRank, host_memory: str) -> None:
    rank = make_rank(num_blocks=40, num_slots=40, host_memory=host_memory, piece_bytes=8 * 544)
    assert rank.slot_bytes == 544
    for count in (40, 39, 23, 9):
        blocks = list(range(count))
        before = rank.blocks(blocks)
        rank.done(rank.store(blocks, blocks[::-1]))
        rank.overwrite(blocks)
        rank.done(rank.load(blocks, blocks))
        rank.put(blocks, [layer[::-1] for layer in before])
        assert rank.wrong_elements() == 0


def test_no_piece_of_a_long_load_is_sent_in_a_larger_buffer(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(num_blocks=40, num_slots=40, piece_bytes=8 * 544)
    rank.done(rank.store(range(16), range(16)))
    sent: list[int] = []
    scatter = DevicePrograms.scatter

    def spy(self: DevicePrograms, shards: Any, blocks: Any, rows: jax.Array) -> Any:
        sent.extend([rows.shape[0]] * (self.device == jax.devices()[0]))
        return scatter(self, shards, blocks, rows)

    monkeypatch.setattr(DevicePrograms, "scatter", spy)
    rank.done(rank.load(range(16), range(16)))
    half = 8 if copies_rows(rank.kv) else 4  # where padding takes no time there are fewer buckets
    assert sorted(sent) == sorted([8, half, 2, 2])


def test_a_store_that_is_dropped_gives_its_memory_back(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank()
    small = JaxDevice(rank.pool, rank.cell, JaxOptions(piece_bytes=4 * rank.slot_bytes, bytes_in_flight=1))
    launched = launches(monkeypatch)
    try:
        dropped = small.gather(list(range(12)))
        assert len(dropped.launched) == 1
        del dropped
        small.launch_rest()
        assert [len(blocks) for _, blocks in launched] == [4, 4, 4]
        assert small.gather([4]).launched
    finally:
        small.close()


# -- failures -------------------------------------------------------------------------------------------------


def test_kv_arrays_that_somebody_donated_fail_ops_and_not_the_process(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.done(rank.store([1], [1]))
    arrays = rank.cell.peek()
    jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0)(arrays)
    assert all(array.is_deleted() for array in arrays)
    assert "KV array 0 was deleted" in rank.failure(rank.store([2], [2]))
    assert "KV array 0 was deleted" in rank.failure(rank.load([2], [1]))
    assert rank.plane.report().state == "ready"


def test_kv_arrays_of_another_shape_or_sharding_fail_ops(make_rank: MakeRank) -> None:
    rank = make_rank()
    arrays = rank.cell.take()
    rank.cell.put([*arrays[:2], jax.numpy.zeros((24, 2, 4), np.uint16)])
    assert "KV array 2 is (24, 2, 4) uint16; it was registered as (24, 2, 8)" in rank.failure(rank.store([2], [2]))
    rank.cell.take()
    rank.cell.put(arrays[:1])
    assert "the KV cache has 1 arrays" in rank.failure(rank.store([2], [2]))
    rank.cell.take()
    rank.cell.put(arrays)
    rank.done(rank.store([2], [2]))
    rank.cell.take()
    elsewhere = jax.device_put(arrays[0], NamedSharding(mesh(), PartitionSpec(None)))
    if DEVICES > 1:
        rank.cell.put([elsewhere, *arrays[1:]])
        assert "it was registered as" in rank.failure(rank.store([2], [2]))


def test_a_cell_is_not_taken_twice_and_not_put_twice() -> None:
    cell = ArrayCell([])
    cell.take()
    with pytest.raises(CopyError, match="were taken"):
        cell.take()
    with pytest.raises(CopyError, match="were taken"):
        cell.peek()
    cell.put([])
    with pytest.raises(CopyError, match="without being taken"):
        cell.put([])


def failing(monkeypatch: pytest.MonkeyPatch, name: str, device: int, *, late: bool = False) -> list[int]:
    """The next launch of `gather` or `scatter` on this device fails; `late`: after it has taken the memory."""
    original = getattr(DevicePrograms, name)
    failed: list[int] = []

    def launch(self: DevicePrograms, *arguments: Any) -> Any:
        if self.device.id == device and not failed:
            failed.append(1)
            if late:
                original(self, *arguments)
            raise RuntimeError("injected")
        return original(self, *arguments)

    monkeypatch.setattr(DevicePrograms, name, launch)
    return failed


@pytest.mark.parametrize("device", range(DEVICES))
def test_a_gather_that_fails_fails_one_store(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    rank = make_rank()
    failing(monkeypatch, "gather", device)
    first, second = rank.store([1, 2], [1, 2]), rank.store([3], [3])
    assert "injected" in rank.failure(first)
    rank.done(second)
    assert rank.wrong_elements() == 0


@pytest.mark.parametrize("device", range(DEVICES))
def test_a_scatter_that_fails_fails_one_load_and_leaves_the_kv_cache_whole(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    rank = make_rank()
    before = rank.blocks([1, 2])
    rank.done(rank.store([1, 2], [1, 2]))
    failing(monkeypatch, "scatter", device)
    first, second = rank.load([3], [1]), rank.load([4, 5], [1, 2])
    assert "injected" in rank.failure(first)
    rank.done(second)
    rank.put([4, 5], before)
    rank.overwrite([3])  # its parts on some devices are written, on others not
    assert rank.wrong_elements() == 0
    assert rank.plane.report().state == "ready"


@pytest.mark.parametrize("device", range(DEVICES))
def test_a_scatter_that_fails_with_the_memory_taken_ends_the_data_plane(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    rank = make_rank()
    rank.done(rank.store([1, 2], [1, 2]))
    failing(monkeypatch, "scatter", device, late=True)
    op = rank.load([3], [1])
    assert "KV cache is lost" in rank.failure(op) or "injected" in rank.failure(op)
    rank.wait_until(lambda: rank.plane.report().state == "failed")
    error = rank.plane.report().error
    assert error is not None
    assert "the KV cache is lost" in error
    assert rank.failure(rank.store([1], [1]))


class Witness:
    """Stands in for the witnesses of scatters. They are ready with `ready`, and when the programs have ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ready = False
        self.error = error
        self.real: list[jax.Array] = []

    def is_ready(self) -> bool:
        return self.ready and all(witness.is_ready() for witness in tuple(self.real))

    def block_until_ready(self) -> None:
        if self.error is not None:
            raise self.error


def with_witness(monkeypatch: pytest.MonkeyPatch, witness: Witness) -> None:
    original = DevicePrograms.scatter

    def scatter(*arguments: Any) -> Any:
        written, real = original(*arguments)
        witness.real.append(real)
        return written, witness

    monkeypatch.setattr(DevicePrograms, "scatter", scatter)


@of_both_memories
def test_a_load_is_done_only_when_its_witness_is_ready(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, host_memory: str
) -> None:
    witness = Witness()
    with_witness(monkeypatch, witness)
    rank = make_rank(host_memory=host_memory)
    rank.done(rank.store([1], [1]))
    op = rank.load([3], [1])
    rank.wait_until(lambda: witness.real, rank.turn)
    other = rank.store([5], [5])
    rank.done(other)  # the copy thread has made turns meanwhile
    assert rank.marks(op) == []
    witness.ready = True
    rank.done(op)


def test_a_program_that_fails_on_the_device_ends_the_data_plane(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = Witness(RuntimeError("injected"))
    witness.ready = True
    with_witness(monkeypatch, witness)
    rank = make_rank()
    rank.done(rank.store([1], [1]))
    assert "a program that writes it has failed: injected" in rank.failure(rank.load([3], [1]))
    assert rank.plane.report().state == "failed"


def test_bytes_that_do_not_arrive_fail_their_store(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank()
    monkeypatch.setattr(RangeCopier, "start", lambda *_: 1 // 0)
    assert "ZeroDivisionError" in rank.failure(rank.store([1], [1]))
    assert "ZeroDivisionError" in rank.failure(rank.load([1], [1]))
    monkeypatch.undo()
    rank.done(rank.store([1], [1]))
    rank.done(rank.load([1], [1]))
    assert rank.wrong_elements() == 0


class HeldJob(CopyJob):
    """Of a copier that is slow: nothing is copied, and it ends when it is told to."""

    ended = False

    @property
    def has_ended(self) -> bool:
        return self.ended


@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_op_that_fails_has_ended_only_when_no_thread_uses_its_slots(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    rank = make_rank()
    rank.done(rank.store(range(8), range(8)))
    jobs: list[HeldJob] = []

    def start(*_: Any) -> HeldJob:
        if jobs:
            raise RuntimeError("injected")
        jobs.append(HeldJob())
        return jobs[0]

    copy = RangeCopier.start
    monkeypatch.setattr(RangeCopier, "start", start)
    op = rank.submit(direction, range(8), range(8))  # two pieces
    other = rank.store([9], [9])
    assert "injected" in rank.failure(other)  # after the second piece of the op
    assert rank.marks(op) in ([], ["source_free"])
    monkeypatch.setattr(RangeCopier, "start", copy)
    rank.done(rank.store([10], [10]))
    assert rank.marks(op) in ([], ["source_free"])
    jobs[0].ended = True
    assert "injected" in rank.failure(op)


@pytest.mark.parametrize(
    ("direction", "blocks", "slots", "error"),
    [
        ("store", (24,), (1,), "blocks 24 to 24; allowed: 0 to 23"),
        ("load", (-1, 2), (1, 2), "blocks -1 to 2; allowed: 0 to 23"),
        ("store", (1, 2), (1,), "2 blocks and 1 slots"),
        ("load", (1,), (1, 2), "1 blocks and 2 slots"),
        ("store", (1,), (32,), "slot 32 is not pinned"),
        ("load", (1,), (-1,), "slots -1 to -1; allowed: 0 to 31"),
    ],
)
def test_an_op_outside_the_kv_cache_or_the_pool_fails(
    shared_ranks: dict[str, JaxRank], direction: str, blocks: tuple[int, ...], slots: tuple[int, ...], error: str
) -> None:
    rank = shared_ranks["plain"]
    assert error in rank.failure(rank.submit(direction, blocks, slots))
    assert rank.wrong_elements() == 0


def test_a_store_that_the_host_has_not_gathered_is_refused(shared_ranks: dict[str, JaxRank]) -> None:
    with pytest.raises(CopyError, match="gathered by the host's thread"):
        shared_ranks["plain"].device.launch_store(1, [1], [1], None)


def test_the_fence_of_a_store_is_reached_when_its_blocks_are_read(make_rank: MakeRank) -> None:
    rank = make_rank()
    gather = rank.device.gather(list(range(24)))
    assert not gather.query()
    rank.device.launch_rest()
    rank.wait_until(gather.query)
    assert not StoreTicket(1).query()


@of_both_memories
def test_what_a_slow_copy_reads_is_not_gathered_into(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, host_memory: str
) -> None:
    """On the CPU gathers write to the memory of earlier ones."""
    rank = make_rank(host_memory=host_memory)
    for _ in range(3):
        rank.done(rank.store(range(4), range(4)))  # leaves memory for later gathers
    held: list[tuple[HeldJob, RangeCopier, Any]] = []

    def start(copier: RangeCopier, ranges: Any) -> HeldJob:
        held.append((HeldJob(), copier, ranges))
        return held[-1][0]

    copy = RangeCopier.start
    monkeypatch.setattr(RangeCopier, "start", start)
    before = rank.blocks(range(8))
    slow = rank.store(range(8), range(8))
    rank.wait_until(lambda: len(held) == 2)
    rank.overwrite(range(24))
    later = rank.store(range(8, 24), range(8, 24))
    rank.wait_until(lambda: "source_free" in rank.marks(later))
    monkeypatch.setattr(RangeCopier, "start", copy)
    for job, copier, ranges in held:
        copy(copier, ranges).result()
        job.ended = True
    rank.done(slow, later)
    rank.done(rank.load(range(8), range(8)))
    rank.put(range(8), before)
    assert rank.wrong_elements() == 0


def test_the_memory_of_gathers_on_the_cpu_is_used_again(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[int, int]] = []
    gather = DevicePrograms.gather

    def spy(self: DevicePrograms, *arguments: Any) -> Any:
        rows = gather(self, *arguments)
        places.append((self.device.id, rows.unsafe_buffer_pointer()))
        return rows

    monkeypatch.setattr(DevicePrograms, "gather", spy)
    rank = make_rank()
    for _ in range(6):
        rank.done(rank.store([1, 2, 3], [1, 2, 3]))
    assert len(places) == 6 * DEVICES
    assert len(set(places)) == DEVICES


def test_an_op_of_no_blocks_is_done(shared_ranks: dict[str, JaxRank]) -> None:
    rank = shared_ranks["plain"]
    rank.done(rank.store([], []), rank.load([], []))


# -- close ----------------------------------------------------------------------------------------------------


@of_both_memories
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_closing_in_the_middle_ends_every_op_once_and_waits_for_no_turn_of_the_host(
    make_rank: MakeRank, host_memory: str, turns: int
) -> None:
    rank = make_rank(host_memory=host_memory, bytes_in_flight=8 * 1024)
    rank.done(rank.store(range(24), range(24)))
    contents = rank.blocks(range(24))
    stores = [rank.store(range(12), range(12, 24)) for _ in range(4)]
    loads = [rank.load([12 + number], [number]) for number in range(12)]
    for _ in range(turns):
        rank.turn()
        rank.overwrite([0])
    started = time.monotonic()
    assert rank.plane.close(timeout=DEADLINE)
    assert time.monotonic() - started < DEADLINE / 2
    rank.collect()
    finals = {op.op_id: [mark for mark in rank.marks(op) if mark != "source_free"] for op in (*stores, *loads)}
    assert all(final in (["done"], ["failed"]) for final in finals.values())
    for number, op in enumerate(loads):
        if finals[op.op_id] == ["done"]:
            rank.put([12 + number], [layer[[number]] for layer in contents])
        else:
            rank.overwrite([12 + number])
    assert rank.wrong_elements() == 0
    assert "closed" in rank.failure(rank.store([1], [1]))
    rank.turn()  # a host may still make its turns


def test_close_waits_for_programs_that_write_blocks(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    class Late(Witness):
        def block_until_ready(self) -> None:
            ended.append(True)

    witness = Late()
    with_witness(monkeypatch, witness)
    rank = make_rank()
    rank.done(rank.store([1], [1]))
    op = rank.load([3], [1])
    rank.wait_until(lambda: witness.real, rank.turn)
    assert rank.plane.close(timeout=0)
    assert ended
    assert rank.marks(op) == ["failed"]


# -- registration ---------------------------------------------------------------------------------------------


def test_kv_arrays_that_cannot_be_offloaded_are_refused() -> None:
    def refused(arrays: list[Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            ShardedKV.of(arrays)
        return str(caught.value)

    zeros = jax.numpy.zeros
    assert "KV arrays is 0" in refused([])
    assert "KV array 0 is (8,)" in refused([zeros((8,))])
    assert "KV array 1: blocks is 9; allowed: 8" in refused([zeros((8, 2)), zeros((9, 2))])
    assert "KV array 1: dtype is 'int32'; allowed: float32" in refused([zeros((8, 2)), zeros((8, 2), np.int32)])
    if DEVICES > 1:
        split = jax.device_put(zeros((8, 2)), NamedSharding(mesh(), PartitionSpec("model")))
        assert "every block on every device" in refused([split])
        other = jax.device_put(zeros((8, 2)), jax.devices()[1])
        assert "the devices of KV array 0" in refused([zeros((8, 2)), other])


def test_a_pool_of_another_layout_is_refused(make_rank: MakeRank) -> None:
    rank = make_rank()
    with pytest.raises(ConfigError, match=r"slot_bytes is \d+; allowed: 8, the bytes of a block on all devices"):
        JaxDevice(rank.pool, ArrayCell([jax.numpy.zeros((8, 2), np.float32)]))


@pytest.mark.parametrize("key", ["piece_bytes", "bytes_in_flight", "copy_threads", "host_memory"])
def test_options_are_checked(key: str) -> None:
    wrong: dict[str, Any] = {key: 0}
    with pytest.raises(ConfigError, match=f"{key} is 0"):
        JaxOptions(**wrong)


def test_pinned_memory_that_a_platform_lays_out_in_another_way_is_not_written_in_place(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstow.devices.jax import hostcopies

    upload = hostcopies.LoadBuffer.upload

    def upload_wrongly(self: hostcopies.LoadBuffer) -> jax.Array:
        return -self._rows if isinstance(self._rows, jax.Array) else upload(self)  # pinned, or ordinary memory

    monkeypatch.setattr(hostcopies.LoadBuffer, "upload", upload_wrongly)
    rank = make_rank(host_memory="pinned")
    assert rank.device.notice is not None
    assert "loads do not use pinned memory" in rank.device.notice
    check_round_trip(rank, [1, 2, 3], [4, 5, 6])


@of_both_memories
def test_the_host_may_have_set_a_mesh(make_rank: MakeRank, host_memory: str) -> None:
    with jax.set_mesh(mesh()):
        check_round_trip(make_rank(host_memory=host_memory), [1, 2, 3], [4, 5, 6])


def test_no_torch_is_in_the_process(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.done(rank.store([1], [1]))
    assert "torch" not in sys.modules
