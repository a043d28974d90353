"""What `test_jax.py` runs, each in a process of its own without torch: `python -m tests.gpu.jaxprograms NAME`."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tests.jax.cluster import Cluster, Scheduler
from tests.jax.rank import JaxRank, mesh
from tests.jax.test_random_programs import test_random_programs_leave_no_wrong_element as check_random_programs

_OPS = 10_000
_AT_ONCE = 8
_STEPS = 60
_PIECES = (1, 2, 4)  # blocks


def copies_go_through_pinned_memory() -> None:
    """By DMA, and once: what the copy thread reads is the memory that the device has written."""
    with closing(JaxRank()) as rank:
        assert rank.device.notice is None, rank.device.notice
        gather = rank.device.gather([1, 2])
        (piece,) = gather.launched
        rank.wait_until(piece.has_arrived)
        for rows in piece.arriving:
            assert rows.sharding.memory_kind == "pinned_host"
            assert np.ascontiguousarray(rows).ctypes.data == rows.unsafe_buffer_pointer()
        before = rank.blocks(range(24))
        rank.done(rank.store(range(24), range(24)))
        rank.overwrite(range(24))
        rank.done(rank.load(range(24), range(24)))
        rank.put(range(24), before)
        assert rank.wrong_elements() == 0


def large_blocks_come_back() -> None:
    """2 MiB in 32 layers, in several pieces."""
    with closing(JaxRank(layers=[(16, 16, 128)] * 32, num_blocks=64, num_slots=64, piece_bytes=16 << 20)) as rank:
        assert rank.slot_bytes == 2 << 20
        before = rank.blocks(range(64))
        rank.done(rank.store(range(64), range(63, -1, -1)))
        rank.overwrite(range(64))
        rank.done(rank.load(range(64), range(64)))
        rank.put(range(64), [layer[::-1] for layer in before])
        assert rank.wrong_elements() == 0


def random_programs_leave_no_wrong_element() -> None:
    ranks: list[JaxRank] = []

    def make_rank(**settings: object) -> JaxRank:
        ranks.append(JaxRank(**settings))  # type: ignore[arg-type]
        return ranks[-1]

    check_random_programs(make_rank, "pinned")
    for rank in ranks:
        rank.close()


def nothing_waits_for_a_step_that_runs() -> None:
    """A step that takes long is on the device while ops on its blocks are submitted, and the steps after them. In at
    least one of the rounds it still runs then: if launching waited, it never would."""
    size = 8192 if jax.default_backend() == "gpu" else 512
    everywhere = NamedSharding(mesh(), PartitionSpec())
    ones = jax.jit(lambda: jnp.ones((size, size), jnp.float32), out_shardings=everywhere)()
    multiply = jax.jit(lambda matrix: matrix @ ones / size)
    depend = jax.jit(
        lambda arrays, last: [array + (last * 0).astype(array.dtype) for array in arrays], donate_argnums=0
    )
    overlapped = 0
    with closing(JaxRank()) as rank:
        stale = rank.blocks([7])
        rank.done(rank.store([7], [31]))
        for _ in range(5):
            product = ones
            for _ in range(100):
                product = multiply(product)
            last = product[0, 0]
            rank.cell.put(depend(list(rank.cell.take()), last))
            before = rank.blocks(range(6))
            store, load = rank.store(range(6), range(6)), rank.load([7], [31])
            rank.overwrite(range(8))
            overlapped += not last.is_ready()
            rank.done(store, load)
            rank.put([7], stale)
            assert rank.wrong_elements() == 0
            rank.done(rank.load(range(6), range(6)))
            rank.put(range(6), before)
            assert rank.wrong_elements() == 0
    assert overlapped, "launching waits for the device"


def two_processes_agree() -> None:
    """Each with a device, and a model that exchanges something in every step. One is slow and repeats itself."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    own = [{"CUDA_VISIBLE_DEVICES": device} for device in devices[:2]]
    cluster = Cluster(own)
    try:
        scheduler = Scheduler(cluster, 1, slow=True, twice=True)
        for number in range(_STEPS):
            scheduler.step(hold=number % 10 > 5)
        verdicts = scheduler.finish()
    finally:
        cluster.kill()
    assert [verdict.wrong_elements for verdict in verdicts] == [0, 0]
    assert [verdict.hidden_collectives for verdict in verdicts] == [0, 0]
    assert verdicts[0].ledger == verdicts[1].ledger
    assert verdicts[0].launches > _STEPS
    assert scheduler.failed == 0
    assert scheduler.loaded > _STEPS


def ten_thousand_ops_leave_nothing_behind() -> None:
    with closing(JaxRank(num_slots=64, num_blocks=64)) as rank:
        chance = random.Random(0)

        def some_ops(count: int) -> None:
            for _ in range(count // _AT_ONCE):
                blocks, slots = chance.sample(range(64), 6 * _AT_ONCE), chance.sample(range(64), 6 * _AT_ONCE)
                ops = []
                for start in range(0, 6 * _AT_ONCE, 6):
                    end = start + chance.randint(1, 6)
                    submit = rank.store if chance.random() < 0.5 else rank.load
                    ops.append(submit(blocks[start:end], slots[start:end]))
                rank.done(*ops)
                rank.completed.clear()
            rank.overwrite(range(64))  # the loads have written what their slots held
            rank.done(rank.store(range(64), range(64)))

        rank.done(rank.store(range(64), range(64)))
        some_ops(_OPS)  # the runtime has its own memory by then
        course = [_held()]
        for _ in range(4):
            some_ops(_OPS // 4)
            course.append(_held())
        before, after = course[0], course[-1]
        print(f"before: {before}\nafter: {after}", file=sys.stderr)
        assert rank.wrong_elements() == 0
        _print_growth(course)
        for held in (before, after):
            del held["resident_bytes"]
        assert after == before


def jax_alone() -> None:
    """The programs and transfers of the ops of `ten_thousand_ops_leave_nothing_behind`, one after the other and without
    KVStow. JAX on CUDA grows by about 800 bytes for each."""
    shapes = [(64, 4, 4, 8), (64, 4, 4, 8), (64, 2, 8)]
    devices = [_AloneDevice(device, shapes) for device in jax.devices()]
    chance = random.Random(0)

    def some_ops(count: int) -> None:
        for _ in range(count * 4 // 3):  # an op has 1 to 6 blocks, in pieces of 4 at most: 4 pieces in 3 ops
            blocks = chance.sample(range(64), chance.choice(_PIECES))
            for device in devices:
                (device.store if chance.random() < 0.5 else device.load)(blocks)

    some_ops(_OPS)
    course = [_held()]
    for _ in range(4):
        some_ops(_OPS // 4)
        course.append(_held())
    _print_growth(course)


class _AloneDevice:
    """A KV cache on one device, and a pinned array for each size of a piece."""

    def __init__(self, device: jax.Device, shapes: Sequence[tuple[int, ...]]) -> None:
        self._on = SingleDeviceSharding(device)
        kind = "unpinned_host" if device.platform == "cpu" else "pinned_host"
        self._pinned = SingleDeviceSharding(device, memory_kind=kind)
        self._shards = [jax.device_put(np.zeros(shape, np.uint16), self._on) for shape in shapes]
        self._width = sum(int(np.prod(shape[1:])) for shape in shapes)
        self._gather, self._scatter = jax.jit(_gather), jax.jit(_scatter, donate_argnums=0)
        self._sent = {size: self._move(np.zeros((size, self._width), np.uint16)) for size in _PIECES}

    def store(self, blocks: list[int]) -> None:
        gathered = self._gather(self._shards, np.array(blocks, np.int32))
        arriving = jax.device_put(gathered, self._pinned)
        while not arriving.is_ready():
            pass
        np.ascontiguousarray(arriving).sum()

    def load(self, blocks: list[int]) -> None:
        rows = jax.device_put(self._sent[len(blocks)], self._on)
        self._shards, witness = self._scatter(self._shards, np.array(blocks, np.int32), rows)
        while not witness.is_ready():
            pass

    def _move(self, rows: np.ndarray) -> jax.Array:
        moved: jax.Array = jax.block_until_ready(jax.device_put(jax.device_put(rows, self._on), self._pinned))
        return moved


def _gather(shards: list[jax.Array], blocks: jax.Array) -> jax.Array:
    return jnp.concatenate([shard[blocks].reshape(len(blocks), -1) for shard in shards], axis=1)


def _scatter(shards: list[jax.Array], blocks: jax.Array, rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    written, start = [], 0
    for shard in shards:
        end = start + shard[0].size
        written.append(shard.at[blocks].set(rows[:, start:end].reshape(len(blocks), *shard.shape[1:])))
        start = end
    return written, jnp.stack([shard[(0,) * shard.ndim] for shard in written])


def _print_growth(course: Sequence[dict[str, int]]) -> None:
    resident = [held["resident_bytes"] for held in course]
    print(f"resident bytes: {resident}", file=sys.stderr)
    print(resident[-1] - resident[0])


def _held() -> dict[str, int]:
    """What this process holds: bytes of each device and of the host, arrays, threads and files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free already is nothing that grows
    held = {
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "native_threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }
    for device in jax.devices():
        held[f"bytes_of_device_{device.id}"] = (device.memory_stats() or {}).get("bytes_in_use", 0)
    return held


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program
    for program in (
        copies_go_through_pinned_memory,
        large_blocks_come_back,
        random_programs_leave_no_wrong_element,
        nothing_waits_for_a_step_that_runs,
        two_processes_agree,
        ten_thousand_ops_leave_nothing_behind,
        jax_alone,
    )
}


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
    assert "torch" not in sys.modules
