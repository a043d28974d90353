"""The CPU device: copies between torch tensors and a pool. Its pinning is `kvstow.memory.mlock`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvstow.devices.base import Fence, PreparedLoad, TicketState
from kvstow.devices.tensorchecks import check_tensors
from kvstow.errors import CopyError
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool


class Run(NamedTuple):
    """Neighbouring blocks that lie in neighbouring slots: one strided copy per region."""

    block: int
    slot: int
    length: int


def merge_runs(blocks: Sequence[int], slots: Sequence[int]) -> Iterator[Run]:
    """The pairs (`blocks[i]`, `slots[i]`) in order, as few runs as possible."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1 or slots[end] != slots[end - 1] + 1:
            yield Run(blocks[start], slots[start], end - start)
            start = end


class CpuTicket:
    """A copy that runs inside the first `poll` after its fence. Used by one thread."""

    def __init__(self, copy: Callable[[], None], after: Fence | None) -> None:
        self._copy, self._after = copy, after
        self._state = TicketState.PENDING
        self._error: BaseException | None = None
        self._seconds = 0.0

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def seconds(self) -> float:
        return self._seconds

    def poll(self) -> TicketState:
        if self._state is TicketState.PENDING:
            try:
                if self._after is None or self._after.query():
                    self._run()
            except Exception as error:  # noqa: BLE001 - poll never raises: the ticket carries the error
                self._state, self._error = TicketState.FAILED, error
        return self._state

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._copy()
        finally:
            self._seconds = time.perf_counter() - started
        self._state = TicketState.DONE


@dataclass(frozen=True, slots=True)
class CpuLoad:
    """A `PreparedLoad`."""

    slots: Sequence[int]

    def close(self) -> None:
        """There is nothing to free."""


class CpuDevice:
    """Moves blocks between `tensors` and `pool`.

    `tensors[i]` is region `i` of `layout` as uint8 `[num_blocks, page_bytes]`, its rows dense and any stride
    between them. It is written and read in place; the caller keeps it alive. The pool is borrowed.
    """

    name, copies_alone = "cpu", False

    def __init__(self, pool: HostPool, layout: KVLayout, tensors: Sequence[torch.Tensor]) -> None:
        check_tensors(pool, layout, tensors, "cpu")
        self._pool, self._num_blocks = pool, layout.num_blocks
        slots = _slots_as_tensor(pool)
        offsets = zip(layout.offsets, layout.regions, strict=True)
        host = [slots[:, offset : offset + region.page_bytes] for offset, region in offsets]
        self._pages = list(zip(tensors, host, strict=True))
        self._closed = False

    def launch_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> CpuTicket:
        return CpuTicket(lambda: self._move(blocks, slots, _store_run), after)

    def prepare_load(self, op_id: int, slots: Sequence[int]) -> CpuLoad:
        return CpuLoad(slots)

    def launch_load(self, load: PreparedLoad, blocks: Sequence[int], after: Fence | None) -> CpuTicket:
        assert isinstance(load, CpuLoad)
        return CpuTicket(lambda: self._move(blocks, load.slots, _load_run), after)

    def advance(self) -> None:
        """Copies run in `CpuTicket.poll`."""

    def close(self) -> None:
        """Copies not yet begun fail from now on. None is under way, because the copy thread is the caller."""
        self._closed = True
        self._pages = []

    def _move(
        self, blocks: Sequence[int], slots: Sequence[int], copy: Callable[[torch.Tensor, torch.Tensor, Run], None]
    ) -> None:
        self._check(blocks, slots)
        # KV tensors that were created in inference mode can be written only in it.
        with torch.inference_mode():
            for run in merge_runs(blocks, slots):
                for kv, host in self._pages:
                    copy(kv, host, run)

    def _check(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if self._closed:
            raise CopyError("the device is closed")
        if len(blocks) != len(slots):
            raise CopyError(f"{len(blocks)} blocks and {len(slots)} slots; allowed: as many of each")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._num_blocks:
            raise CopyError(f"blocks {min(blocks)} to {max(blocks)}; allowed: 0 to {self._num_blocks - 1}")
        if slots and min(slots) < 0:
            raise CopyError(f"slot {min(slots)}; allowed: 0 or more")
        if slots and max(slots) >= (pinned := self._pool.pinned_slots):
            raise CopyError(f"slot {max(slots)} is not pinned; the pool has {pinned} slots pinned")


def _store_run(kv: torch.Tensor, host: torch.Tensor, run: Run) -> None:
    host[run.slot : run.slot + run.length].copy_(kv[run.block : run.block + run.length])


def _load_run(kv: torch.Tensor, host: torch.Tensor, run: Run) -> None:
    kv[run.block : run.block + run.length].copy_(host[run.slot : run.slot + run.length])


def _slots_as_tensor(pool: HostPool) -> torch.Tensor:
    """The pool's whole address space as `[max_slots, slot_stride]`. Touches no memory."""
    num_bytes = pool.max_slots * pool.slot_stride
    memory = (ctypes.c_uint8 * num_bytes).from_address(pool.address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(pool.max_slots, pool.slot_stride)
