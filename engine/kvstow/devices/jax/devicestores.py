"""Stores: the host's thread gathers their blocks into device memory, and the copy thread moves them to the pool.

A gather needs no fence. It is launched after the steps that wrote its blocks, on the arrays that they returned, and
before those that overwrite them, and the runtime orders programs on the same arrays. So a store's blocks are free as
soon as its gathers are launched, in the step that plans it. A step whose gathers exceed the memory in flight waits.

The steps alone decide what is launched, so that all hosts launch the same. The gathers of a store that has failed on
this host are launched, too.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from kvstow.devices.base import TicketState
from kvstow.devices.jax.hostcopies import BytesInFlight, CopyJob, Held, Range, RangeCopier, wait_until
from kvstow.devices.jax.programs import DevicePrograms, bucket_of, pieces_of
from kvstow.devices.jax.shards import KVCell, ShardedKV, Shards
from kvstow.errors import CopyError

Rows = Sequence[jax.Array]
"""The rows of some blocks, by device."""

_SPARE = 8
"""How many rows of each size are kept for later gathers."""

_COPYING = 2
"""How many pieces are copied to the pool at a time. With two, the copy threads need not wait between pieces. With more,
a load would wait behind more of them."""


class GatheredPiece:
    """Some blocks of a store on their way to the host, by device. Their bytes count as in flight until the last
    reference to the piece is dropped, because the op may also fail before the copy thread has the piece."""

    def __init__(self, num_blocks: int, gathered: Rows, arriving: Rows, held: Held, *, reusable: bool) -> None:
        self.num_blocks = num_blocks
        self.arriving = arriving
        self.reusable = gathered if reusable else None
        """Rows for a later gather, once nothing uses this piece."""
        self.job = CopyJob()
        self.host: list[np.ndarray] = []
        """The memory that the job copies, if it is not where the bytes have arrived."""
        self._gathered: Rows | None = gathered
        self._held = held

    def is_gathered(self) -> bool:
        if self._gathered is not None and _are_ready(self._gathered):
            self._gathered = None
        return self._gathered is None

    def has_arrived(self) -> bool:
        """Whether the bytes are in host memory, or never will be."""
        return _are_ready(self.arriving)


class StoreTicket:
    """A store, first as the fence that is reached when all its gathers have read their blocks, and from `queue` on also
    as the op's ticket. The host's thread appends the pieces that it launches, and the copy thread takes them."""

    def __init__(self, num_pieces: int) -> None:
        self.num_unlaunched = num_pieces
        self.launched: deque[GatheredPiece] = deque()
        self.copying: deque[GatheredPiece] = deque()
        self.slots: Sequence[int] = ()
        """The addresses of the slots."""
        self.num_started = self.num_copied = 0
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.began: float | None = None
        """When the first piece was gathered."""

    def fail(self, error: BaseException) -> None:
        """Keeps the first error."""
        self.error = self.error or error.with_traceback(None)

    def query(self) -> bool:
        """Whether all blocks have been read, so that the next step may overwrite them."""
        return not self.num_unlaunched and all(piece.is_gathered() for piece in tuple(self.launched))

    @property
    def has_ended(self) -> bool:
        """A store that failed has ended when nothing writes its slots any more."""
        return not self.copying and (self.error is not None or self.num_copied == len(self.slots))

    def poll(self) -> TicketState:
        if self.has_ended:
            return TicketState.DONE if self.error is None else TicketState.FAILED
        return TicketState.PENDING if self.num_unlaunched else TicketState.SOURCE_FREE


class DeviceStores:
    """All stores of a rank. `gather` and `launch_rest` belong to the host's thread, the others to the copy thread."""

    def __init__(
        self,
        kv: ShardedKV,
        cell: KVCell,
        programs: Sequence[DevicePrograms],
        copier: RangeCopier,
        buckets: Sequence[int],
        in_flight: BytesInFlight,
        stopping: Event,
        *,
        pinned: bool,
        addressable: bool,
    ) -> None:
        """`pinned`: whether the devices copy to pinned memory; false for CPU devices, whose memory is the host's.
        `addressable`: whether the copy thread can read the memory where the bytes arrive. If not, JAX copies them once
        more."""
        self._kv, self._cell, self._programs, self._buckets = kv, cell, programs, buckets
        self._in_flight, self._copier, self._stopping = in_flight, copier, stopping
        self._addressable = addressable
        self._pinned = (
            [SingleDeviceSharding(device, memory_kind="pinned_host") for device in kv.devices] if pinned else None
        )
        self._reuses = programs[0].reuses_rows
        self._spare: dict[int, deque[Rows]] = {bucket: deque(maxlen=_SPARE) for bucket in buckets}
        """Rows for later gathers, by bucket. The copy thread adds them, and the host's thread takes them."""
        self._rest: deque[Sequence[int]] = deque()
        """The blocks of the last store's pieces that are not launched yet."""
        self._last: Callable[[], StoreTicket | None] = lambda: None
        """Returns the last store, or None if it failed before the copy thread had it."""
        self._tickets: list[StoreTicket] = []

    def gather(self, blocks: Sequence[int]) -> StoreTicket:
        """Launch the first gather of a store; `launch_rest` launches the others."""
        pieces = pieces_of(len(blocks), self._buckets[-1])
        self._rest = deque(blocks[piece.start : piece.stop] for piece in pieces)
        ticket = StoreTicket(len(pieces))
        self._last = weakref.ref(ticket)
        if pieces:
            self._launch_piece([])
        return ticket

    def launch_rest(self) -> None:
        """Launch the other gathers of the store. Waits for memory in flight."""
        split: list[Shards] = []  # the parts of the arrays, which stay the same meanwhile
        while self._rest:
            self._launch_piece(split)

    def queue(self, ticket: StoreTicket, slots: Sequence[int]) -> None:
        """`slots`: the addresses of the slots."""
        ticket.slots = slots
        self._tickets.append(ticket)

    def advance(self) -> bool:
        """Begin to copy one piece that has arrived to the pool, and notice copies that have ended. Returns False if
        there was nothing to do."""
        self._tickets = [ticket for ticket in self._tickets if not ticket.has_ended]
        ended = sum(map(self._end_copies, self._tickets))
        return any(map(self._begin_copy, self._tickets)) or bool(ended)

    def close(self) -> None:
        """Drop all stores. The caller has closed the copier, so nothing writes the pool's slots."""
        self._tickets.clear()
        for spare in self._spare.values():
            spare.clear()

    def _launch_piece(self, split: list[Shards]) -> None:
        """Launch the gather of the next piece. `split` has the parts of the arrays by device; the first piece fills it.
        The gather of a store that has failed is launched as well, but its rows are dropped."""
        blocks = self._rest.popleft()
        bucket = bucket_of(self._buckets, len(blocks))
        held = self._wait_for_memory(bucket * self._kv.layout.slot_bytes)
        try:
            split[:] = split or self._kv.split(self._cell.peek())
            spare = self._take_spare(bucket)
            gathered = [
                program.gather(shards, blocks, rows)
                for program, shards, rows in zip(self._programs, split, spare, strict=True)
            ]
            arriving = gathered
            if self._pinned is not None:
                arriving = [jax.device_put(rows, pinned) for rows, pinned in zip(gathered, self._pinned, strict=True)]
            if not self._addressable:
                for rows in arriving:
                    rows.copy_to_host_async()
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            if (ticket := self._last()) is not None:
                ticket.fail(error)
            return
        if held is None:
            with suppress(Exception):
                jax.block_until_ready(arriving)  # so that no more memory is in use than for one piece
        elif (ticket := self._last()) is not None and ticket.error is None:
            ticket.launched.append(GatheredPiece(len(blocks), gathered, arriving, held, reusable=self._reuses))
            ticket.num_unlaunched -= 1

    def _wait_for_memory(self, num_bytes: int) -> Held | None:
        """Wait until `num_bytes` more may be in flight, and count them. None if the store has failed."""
        taken: list[Held] = []

        def is_ready() -> bool:
            ticket = self._last()
            if ticket is None or ticket.error is not None:
                return True
            if (held := self._in_flight.take(num_bytes)) is not None:
                taken.append(held)
            return held is not None

        stopped = self._stopping.is_set()
        if (stopped or not wait_until(is_ready, self._stopping)) and (ticket := self._last()) is not None:
            what = "the data plane was closed" if self._stopping.is_set() else "memory in flight did not become free"
            ticket.fail(CopyError(f"{what} before the host launched the op"))
        return taken[0] if taken else None

    def _take_spare(self, bucket: int) -> Sequence[jax.Array | None]:
        try:
            return self._spare[bucket].pop()
        except IndexError:
            return [None] * len(self._programs)

    def _begin_copy(self, ticket: StoreTicket) -> bool:
        if ticket.error is not None or not ticket.launched:
            return False
        piece = ticket.launched[0]
        if ticket.began is None and piece.is_gathered():
            ticket.began = time.perf_counter()
        if not piece.has_arrived() or sum(len(one.copying) for one in self._tickets) >= _COPYING:
            return False
        slots = ticket.slots[ticket.num_started : ticket.num_started + piece.num_blocks]
        try:
            piece.job = self._copier.start(self._ranges(piece, slots))
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            ticket.fail(error)
            return True
        ticket.copying.append(piece)
        ticket.launched.popleft()
        ticket.num_started += piece.num_blocks
        return True

    def _end_copies(self, ticket: StoreTicket) -> bool:
        ended = False
        while ticket.copying and ticket.copying[0].job.has_ended:
            piece, ended = ticket.copying.popleft(), True
            try:
                piece.job.result()
            except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
                ticket.fail(error)
            if piece.reusable is not None:
                self._spare[piece.reusable[0].shape[0]].append(piece.reusable)
            ticket.num_copied += piece.num_blocks
            ticket.seconds = time.perf_counter() - (ticket.began or 0.0)
        return ended

    def _ranges(self, piece: GatheredPiece, slots: Sequence[int]) -> list[Range]:
        ranges: list[Range] = []
        size = self._kv.part_bytes
        for device, rows in enumerate(piece.arriving):
            source, part = self._address(piece, rows), device * size
            ranges += [Range(slot + part, source + row * size, size) for row, slot in enumerate(slots)]
        return ranges

    def _address(self, piece: GatheredPiece, rows: jax.Array) -> int:
        """Return the address of the first row, which the others follow. If the memory is addressable, this makes no
        numpy view of the array: JAX would keep the view, and copy the array when its memory is reused."""
        if self._addressable:
            return int(rows.unsafe_buffer_pointer())
        piece.host.append(np.ascontiguousarray(rows))
        return int(piece.host[-1].ctypes.data)


def _are_ready(by_device: Rows) -> bool:
    return all(rows.is_ready() for rows in by_device)
