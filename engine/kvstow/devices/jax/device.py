"""The JAX device: the host's thread launches programs, and the copy thread moves bytes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvstow.devices.base import Fence, checked, checked_slots
from kvstow.devices.jax.deviceloads import DeviceLoads, LoadTicket
from kvstow.devices.jax.devicestores import DeviceStores, StoreTicket
from kvstow.devices.jax.hostcopies import PAST_CACHE_BYTES, BytesInFlight, RangeCopier, cached_copy_bytes, load_buffers
from kvstow.devices.jax.programs import DevicePrograms, buckets_up_to, compile_all, copies_rows
from kvstow.devices.jax.shards import KVCell, ShardedKV
from kvstow.errors import ConfigError, CopyError
from kvstow.memory.slotpool import SlotPool
from kvstow.messages import LoadLaunch, StagedLoad

logger = logging.getLogger("kvstow.jax")

HostMemory = Literal["auto", "plain", "pinned"]
HOST_MEMORY: tuple[HostMemory, ...] = get_args(HostMemory)
_MOST_BUFFERS = 8
"""Buffers of each size that loads have at most."""

_PIECE_BYTES, _ROWS_PIECE_BYTES = 64 << 20, 16 << 20
"""The default of `piece_bytes`, and its default where programs copy row by row in ordinary memory."""

_ADVANCE_SECONDS = 2e-3
"""Seconds until `advance` returns. It copies small pieces itself, and a longer call would delay the polls."""


@dataclass(frozen=True, slots=True)
class JaxOptions:
    """How bytes travel. Sizes in bytes.

    `host_memory`: "pinned" copies through JAX's pinned memory, "plain" through memory that devices and host share, as
    on the CPU; "auto" decides by the platform.
    `piece_bytes`: what one program, and one transfer to each device, move of an op at most; at least one block. The
    default is 64 MiB, but 16 MiB on the CPU, where pieces are gathered while others are copied, and fit into a cache.
    `bytes_in_flight`: what the stores of a rank hold at once, on its devices and in pinned memory, and also what its
    loads hold. One piece of a store, and two buffers of each size for loads, are always allowed. A step whose stores
    exceed it waits until older ones have been copied.
    `copy_threads`: how many threads copy between pinned memory and the pool. The default is 3 of 4 CPUs, and at most
    12, because one thread reaches a tenth of a fast link.
    """

    host_memory: HostMemory = "auto"
    piece_bytes: int | None = None
    bytes_in_flight: int = 512 << 20
    copy_threads: int = field(default_factory=lambda: max(1, min(12, (os.cpu_count() or 1) * 3 // 4)))

    def __post_init__(self) -> None:
        if self.host_memory not in HOST_MEMORY:
            raise ConfigError("host_memory", self.host_memory, " or ".join(HOST_MEMORY))
        keys = ["bytes_in_flight", "copy_threads"] + ["piece_bytes"] * (self.piece_bytes is not None)
        for key in keys:
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise ConfigError(key, value, "a whole number, 1 or more")


class JaxDevice:
    """Moves blocks between the KV arrays in `cell` and `pool`; protocols in `kvstow.devices.base`. It is also the
    `Launcher` of its data plane.

    The host's thread, which launches the host's steps, makes the device. Only this thread may launch programs, until
    another one calls `follow_host`. The pool is borrowed, and its slots are laid out as `ShardedKV.layout` says. JAX
    gets none of its memory. The copy thread and its helpers only copy within host memory, and give JAX no work.

    `_launching` keeps `close` from overtaking a launch.
    """

    copies_alone = False

    def __init__(self, pool: SlotPool, cell: KVCell, options: JaxOptions | None = None) -> None:
        """Compiles all programs, which takes seconds. Raises `ConfigError`, and then leaves nothing behind."""
        options = options or JaxOptions()
        kv = ShardedKV.of(cell.peek())
        slot_bytes, platform = kv.layout.slot_bytes, kv.devices[0].platform
        if slot_bytes != pool.slot_bytes:
            raise ConfigError("slot_bytes", pool.slot_bytes, f"{slot_bytes}, the bytes of a block on all devices")
        self.name = f"{platform}:{','.join(str(device.id) for device in kv.devices)}"
        self._pool, self._num_blocks = pool, kv.num_blocks
        self._host = threading.get_ident()
        self._launching = threading.Lock()
        self._stopping = threading.Event()
        self._stopped: CopyError | None = None
        pinned = options.host_memory == "pinned" or (options.host_memory == "auto" and platform != "cpu")
        by_rows = copies_rows(kv)
        piece_bytes = options.piece_bytes or (_ROWS_PIECE_BYTES if by_rows and not pinned else _PIECE_BYTES)
        buckets = buckets_up_to(min(max(1, piece_bytes // slot_bytes), kv.num_blocks), pads_free=by_rows)
        self._most = buckets[-1]
        programs = _compiled(kv, buckets)
        of_each = max(2, min(_MOST_BUFFERS, options.bytes_in_flight // (sum(buckets) * slot_bytes)))
        sizes = [bucket for bucket in buckets for _ in range(of_each)]
        buffers, self.notice = load_buffers(kv.devices, sizes, programs[0].width, kv.dtype, pinned=pinned)
        if self.notice is not None:
            logger.warning("%s", self.notice)
        if pinned:
            _log_cached_copies(kv.part_bytes)
        self._copier = RangeCopier(options.copy_threads)
        parts = kv, cell, programs, self._copier, buckets
        self._stores = DeviceStores(
            *parts,
            BytesInFlight(options.bytes_in_flight),
            self._stopping,
            pinned=pinned,
            addressable=platform == "cpu" or self.notice is None,
        )
        self._loads = DeviceLoads(*parts, buffers, self._stopping)

    # The host's thread.

    def gather(self, blocks: Sequence[int]) -> StoreTicket:
        with self._launching:
            self._require_host()
            checked("blocks", blocks, self._num_blocks)
            return self._stores.gather(blocks)

    def launch_rest(self) -> None:
        with self._launching:
            self._stores.launch_rest()

    def expect(self, op_id: int, num_blocks: int) -> LoadTicket:
        with self._launching:
            self._require_host()
            return self._loads.expect(op_id, num_blocks)

    def write(self, launches: Sequence[LoadLaunch]) -> None:
        with self._launching:
            try:
                self._require_host()
            except CopyError as error:
                self._loads.fail(launches, error)
                return
            try:
                self._loads.launch(launches)
            except Exception as error:  # noqa: BLE001 - the failure of these loads; the host's step continues
                self._loads.fail(launches, error)

    def take_staged(self) -> list[StagedLoad]:
        news = self._loads.news
        return [news.popleft() for _ in range(len(news))]

    def stop(self) -> None:
        self._stopping.set()  # first, so that a launch that waits gives up
        with self._launching:
            self._stopped = self._stopped or CopyError("the data plane was closed before the host launched the op")

    def follow_host(self) -> None:
        """Make the calling thread the host's thread."""
        with self._launching:
            self._host = threading.get_ident()

    # The copy thread.

    def launch_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> StoreTicket:
        if not isinstance(after, StoreTicket):
            raise CopyError(
                "the blocks of a store are gathered by the host's thread, with `gather`, before it is queued"
            )
        self._stores.queue(after, self._addresses(blocks, slots))
        return after

    def launch_load(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> LoadTicket:
        if not isinstance(after, LoadTicket):
            raise CopyError("the host's thread has to announce a load, with `expect`, before it is queued")
        addresses = self._addresses(blocks, slots)
        checked("blocks", blocks, self._num_blocks)
        self._loads.queue(after, blocks, addresses)
        return after

    def advance(self) -> None:
        """Raises if the KV cache is lost. Returns after 2 ms even if there is more to do."""
        if self._stopped is not None:
            self._loads.fail_unlaunched(self._stopped)
        until = time.perf_counter() + _ADVANCE_SECONDS
        while (self._loads.advance() or self._stores.advance()) and time.perf_counter() < until:
            pass

    def close(self) -> None:
        self.stop()
        self._copier.close()
        self._loads.close()
        self._stores.close()

    def _addresses(self, blocks: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Check the slots, and return their addresses."""
        if self._stopped is not None:
            raise CopyError("the device is closed")
        addresses: list[int] = self._pool.addresses(checked_slots(self._pool, slots, blocks)).tolist()
        return addresses

    def _require_host(self) -> None:
        if threading.get_ident() != self._host:
            raise CopyError(
                f"thread {threading.current_thread().name} may not launch programs; only the thread of the host's "
                "steps may (see `follow_host`), because programs must be launched in the order of the host's own"
            )


def _log_cached_copies(part_bytes: int) -> None:
    """Advise a setting of glibc if its copies of `part_bytes`, which a thread copies at once, go through the cache."""
    cached = cached_copy_bytes()
    if cached is not None and PAST_CACHE_BYTES <= part_bytes < cached:
        logger.info(
            "glibc copies up to %d bytes through the CPU's cache; stores and loads may be faster with "
            "GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=%d in the environment that this process starts with",
            cached,
            PAST_CACHE_BYTES,
        )


def _compiled(kv: ShardedKV, buckets: Sequence[int]) -> list[DevicePrograms]:
    """The programs of each device."""
    started = time.perf_counter()
    programs = [DevicePrograms(kv, device, buckets) for device in kv.devices]
    compile_all(programs, buckets, os.cpu_count() or 1)
    took = time.perf_counter() - started
    logger.info("compiled %d programs for each of %d devices in %.1f s", 2 * len(buckets), len(programs), took)
    return programs
