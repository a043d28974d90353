"""The CPU device: copies between torch tensors and a pool, with `mlock` as pinning."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.devices.base import Fence, PreparedLoad, TicketState
from kvstow.devices.tensorchecks import check_tensors
from kvstow.errors import CopyError, PinError
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import PopulateOnly, Registrar

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = _libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


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


class MlockRegistrar:
    """Locks memory with `mlock`, as far as the process may. After the first refusal it locks no more: the memory is
    populated and usable, `mode` becomes "populate", and `notice` names the limit. One registrar per pool."""

    def __init__(self) -> None:
        self.locked_bytes = 0
        self.notice: str | None = None
        self._locked: set[int] = set()

    @property
    def mode(self) -> str:
        return "mlock" if self.notice is None else "populate"

    def prepare_thread(self) -> None:
        """Locks belong to the process, so there is nothing to do."""

    def register(self, address: int, num_bytes: int) -> None:
        if self.notice is not None:
            return
        self._locked.add(address)  # before the call, which a signal handler may interrupt
        if _libc.mlock(address, num_bytes) == 0:
            self.locked_bytes += num_bytes
            return
        code = ctypes.get_errno()
        self._locked.remove(address)
        _libc.munlock(address, num_bytes)  # it may have locked a part
        what = f"mlock of {format_size(num_bytes)} failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
        if not _forbidden(code, num_bytes):
            raise PinError("memlock", what)
        self.notice = (
            f"{what}; RLIMIT_MEMLOCK is {format_size(_memlock_limit())} and CAP_IPC_LOCK is missing. "
            f"{format_size(self.locked_bytes)} are locked; the rest is populated, but the machine may swap it"
        )

    def unregister(self, address: int, num_bytes: int) -> None:
        if address not in self._locked:
            return
        if _libc.munlock(address, num_bytes) != 0:
            raise PinError("memlock", f"munlock of {format_size(num_bytes)} failed: {os.strerror(ctypes.get_errno())}")
        self._locked.remove(address)
        self.locked_bytes -= num_bytes


class HugetlbRegistrar(PopulateOnly):
    """For reserved huge pages: they are never swapped, so they need no lock and no limit applies."""

    mode = "hugetlb"

    def __init__(self) -> None:
        self.locked_bytes = 0

    def register(self, address: int, num_bytes: int) -> None:
        self.locked_bytes += num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        self.locked_bytes -= num_bytes


def cpu_registrar(config: PoolConfig) -> Registrar:
    """The registrar for a pool that only the CPU copies from."""
    return HugetlbRegistrar() if config.huge_pages == "reserved" else MlockRegistrar()


def _forbidden(code: int, num_bytes: int) -> bool:
    """Whether `mlock` failed for lack of permission: EPERM at a limit of 0, ENOMEM above a limit. ENOMEM alone can have
    other causes."""
    limit = _memlock_limit()
    above_limit = limit != resource.RLIM_INFINITY and _locked_by_process() + num_bytes > limit
    return code == errno.EPERM or (code == errno.ENOMEM and above_limit)


def _memlock_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _locked_by_process() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:")), 0)
