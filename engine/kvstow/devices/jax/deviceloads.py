"""Loads: the copy thread stages their bytes in host memory. Then the host's thread sends them to the devices and
launches the programs that write the blocks, in the step that names the load.

A load needs no fence: the scatter replaces the arrays that the last step returned, so it follows all older programs on
them, and the next step follows it.

The steps alone decide what is launched, so that all hosts launch the same, whenever their bytes are staged. If a load
has failed on this host, the scatter that is launched for it writes nothing.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Event

import jax
import numpy as np

from kvstow.devices.base import TicketState
from kvstow.devices.jax.hostcopies import CopyJob, LoadBuffer, Range, RangeCopier, wait_until
from kvstow.devices.jax.programs import DevicePrograms, bucket_of, pieces_of
from kvstow.devices.jax.shards import KVCell, ShardedKV, Shards
from kvstow.errors import CopyError
from kvstow.messages import LoadLaunch, StagedLoad

logger = logging.getLogger("kvstow.jax")

Buffers = Sequence[LoadBuffer]
"""One buffer for each device, all of one size."""


class LoadTicket:
    """The ticket of a load. It is made when the host announces the load, and is the `after` with which the load is
    queued, so it has no slots before that. `DeviceLoads.advance` moves it on."""

    def __init__(self, op_id: int, num_blocks: int, most: int) -> None:
        """`most`: how many blocks a piece has at most."""
        self.op_id, self.num_blocks = op_id, num_blocks
        pieces = pieces_of(num_blocks, most)
        self.places = deque(reversed(pieces))  # the small ones come last
        self.num_pieces = len(pieces)
        self.blocks: Sequence[int] = ()
        self.slots: Sequence[int] = ()
        """The addresses of the slots."""
        self.staged: deque[LoadPiece] = deque()
        """The copy thread adds pieces, and the host's thread takes them."""
        self.num_filling = self.num_staged = self.num_launched = self.num_written = 0
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.began: float | None = None

    @property
    def has_ended(self) -> bool:
        """A load that failed has ended when nothing reads its slots, and no program writes its blocks any more."""
        if self.error is None:
            return self.num_written == self.num_pieces
        return not self.num_filling and self.num_written == self.num_launched

    def fail(self, error: BaseException) -> None:
        """Keeps the first error."""
        self.error = self.error or error.with_traceback(None)

    def query(self) -> bool:
        """Always True: a load may be staged at once, because the host launches its writes later."""
        return True

    def poll(self) -> TicketState:
        if not self.has_ended:
            return TicketState.PENDING
        return TicketState.DONE if self.error is None else TicketState.FAILED


class LoadPiece:
    """Some blocks of a load. A job fills the buffers, and then the host's thread launches the programs that write the
    blocks. `witnesses` are ready when these programs have ended."""

    def __init__(self, ticket: LoadTicket, blocks: Sequence[int], buffers: Buffers, job: CopyJob) -> None:
        self.ticket, self.blocks, self.buffers, self.job = ticket, blocks, buffers, job
        self.arrays: list[jax.Array] = []
        self.witnesses: list[jax.Array] = []

    def is_written(self) -> bool:
        return all(witness.is_ready() for witness in self.witnesses)


class DeviceLoads:
    """All loads of a rank. `expect`, `launch` and `fail` belong to the host's thread, the others to the copy thread.
    A launch that begins after `stopping` is set writes no block."""

    def __init__(
        self,
        kv: ShardedKV,
        cell: KVCell,
        programs: Sequence[DevicePrograms],
        copier: RangeCopier,
        buckets: Sequence[int],
        buffers: Sequence[Buffers],
        stopping: Event,
    ) -> None:
        """`buffers`: a number of them for each bucket. They bound the bytes of loads, in host memory and on the
        devices."""
        self._kv, self._cell, self._programs, self._buckets = kv, cell, programs, buckets
        self._copier, self._stopping = copier, stopping
        self._free: dict[int, list[Buffers]] = {bucket: [] for bucket in buckets}
        for one in buffers:
            self._give_back(one)
        self._expected: weakref.WeakValueDictionary[int, LoadTicket] = weakref.WeakValueDictionary()
        """The announced loads by op. An op that fails before it is queued drops its ticket."""
        self._tickets: list[LoadTicket] = []
        self._filling: deque[LoadPiece] = deque()
        self._launched: deque[LoadPiece] = deque()
        self.news: deque[StagedLoad] = deque()
        """Which pieces have been staged. The copy thread adds to it, and the host's thread takes from it."""
        self.lost: BaseException | None = None
        """Why the KV cache is lost, or None."""

    def expect(self, op_id: int, num_blocks: int) -> LoadTicket:
        ticket = LoadTicket(op_id, num_blocks, self._buckets[-1])
        self._expected[op_id] = ticket
        return ticket

    def launch(self, launches: Sequence[LoadLaunch]) -> None:
        """Launch the scatters of these pieces, in this order. Waits for pieces that are not staged yet."""
        if not launches:
            return
        arrays = self._cell.take()
        split: list[Shards] = []
        try:
            for launch in launches:
                pieces = pieces_of(launch.num_blocks, self._buckets[-1])
                for number in range(launch.first, min(launch.stop, len(pieces))):
                    if self.lost is not None:
                        self.fail([launch], self.lost)
                        break
                    piece = self._staged_piece(launch.op_id, number)
                    if piece is None:
                        self._scatter_nothing(bucket_of(self._buckets, len(pieces[number])), arrays, split)
                        continue
                    self._scatter(piece, arrays, split)
                    self._launched.append(piece)
        finally:
            self._cell.put(self._rejoined(split, arrays))

    def fail(self, launches: Sequence[LoadLaunch], error: BaseException) -> None:
        for launch in launches:
            if (ticket := self._expected.get(launch.op_id)) is not None:
                ticket.fail(error)

    def queue(self, ticket: LoadTicket, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """`slots`: the addresses of the slots."""
        ticket.blocks, ticket.slots = blocks, slots
        self._tickets.append(ticket)

    def advance(self) -> bool:
        """Begin to stage one piece, and move on those under way. Returns False if there was nothing to do, or no free
        buffer. Raises if the KV cache is lost."""
        self._end_written()
        if self.lost is not None:
            raise self.lost
        filled = bool(self._filling) and self._filling[0].job.has_ended
        while self._filling and self._filling[0].job.has_ended:
            self._end_fill(self._filling.popleft())
        self._tickets = [ticket for ticket in self._tickets if not self._has_ended(ticket)]
        unstaged = (ticket for ticket in self._tickets if ticket.places and ticket.error is None)
        return next(map(self._stage, unstaged), False) or filled

    def fail_unlaunched(self, error: BaseException) -> None:
        """Fail the loads that are not completely launched, because the host launches nothing more."""
        for ticket in self._tickets:
            if ticket.num_launched < ticket.num_pieces:
                ticket.fail(error)

    def close(self) -> None:
        """Wait for the programs and transfers under way, which use the buffers and write the blocks. The caller has
        closed the copier, so nothing reads the pool's slots."""
        for piece in self._launched:
            _wait(piece.arrays)
            _wait(piece.witnesses)
        self._filling.clear()
        self._launched.clear()
        self._tickets.clear()
        self._free = {bucket: [] for bucket in self._buckets}

    def _stage(self, ticket: LoadTicket) -> bool:
        """Begin to stage the next piece of a load. Returns False if no buffer is free."""
        place = ticket.places[0]
        free = self._free[bucket_of(self._buckets, len(place))]
        if not free:
            return False
        ticket.places.popleft()
        ticket.began = ticket.began or time.perf_counter()
        buffers = free.pop()
        blocks, slots = ticket.blocks[place.start : place.stop], ticket.slots[place.start : place.stop]
        try:
            job = self._copier.start(self._ranges(buffers, slots))
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            ticket.fail(error)
            self._give_back(buffers)
            return True
        ticket.num_filling += 1
        self._filling.append(LoadPiece(ticket, blocks, buffers, job))
        return True

    def _end_fill(self, piece: LoadPiece) -> None:
        ticket = piece.ticket
        ticket.num_filling -= 1
        try:
            piece.job.result()
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            ticket.fail(error)
        if ticket.error is not None:
            self._give_back(piece.buffers)
            return
        ticket.seconds = time.perf_counter() - (ticket.began or 0.0)
        ticket.staged.append(piece)
        self.news.append(StagedLoad(ticket.op_id, ticket.num_staged + 1))
        ticket.num_staged += 1  # last: it shows the piece to the host's thread

    def _has_ended(self, ticket: LoadTicket) -> bool:
        while ticket.error is not None and ticket.staged:
            with suppress(IndexError):  # the host's thread has just taken it
                self._give_back(ticket.staged.popleft().buffers)
        return ticket.has_ended

    def _ranges(self, buffers: Buffers, slots: Sequence[int]) -> list[Range]:
        ranges: list[Range] = []
        size = self._kv.part_bytes
        for device, buffer in enumerate(buffers):
            part = device * size
            ranges += [Range(buffer.address + row * size, slot + part, size) for row, slot in enumerate(slots)]
        return ranges

    def _end_written(self) -> None:
        while self.lost is None and self._launched and self._launched[0].is_written():
            piece = self._launched.popleft()
            try:
                jax.block_until_ready(piece.witnesses)
            except Exception as error:  # noqa: BLE001 - `advance` raises it
                self.lost = CopyError(f"the KV cache is lost: a program that writes it has failed: {error}")
                return
            piece.arrays.clear()
            self._give_back(piece.buffers)
            piece.ticket.num_written += 1

    def _give_back(self, buffers: Buffers) -> None:
        self._free[buffers[0].bucket].append(buffers)

    def _staged_piece(self, op_id: int, number: int) -> LoadPiece | None:
        """Wait for this piece, which the caller then launches. None if its load has failed here, or the device
        stops."""

        def is_ready() -> bool:
            ticket = self._expected.get(op_id)
            return ticket is None or ticket.error is not None or ticket.num_staged > number

        was_staged = wait_until(is_ready, self._stopping)
        ticket = self._expected.get(op_id)
        if ticket is None or self._stopping.is_set():
            return None
        if not was_staged:
            ticket.fail(CopyError("its bytes were not staged in time"))
        ticket.num_launched += 1  # first, so that the load does not end before the caller has launched the piece
        if ticket.error is None:
            with suppress(IndexError):  # the load has failed meanwhile
                return ticket.staged.popleft()
        ticket.num_launched -= 1
        return None

    def _scatter(self, piece: LoadPiece, arrays: Sequence[jax.Array], split: list[Shards]) -> None:
        """Write the blocks of a piece on all devices. `split` has the parts of `arrays` by device; the first piece
        fills it. Each scatter replaces the parts of a device by new arrays in the same memory. After an error, each
        device has its part of the KV cache, with the blocks written or not, or the cache is lost."""
        try:
            split[:] = split or self._kv.split(arrays)
            piece.arrays = [buffer.upload() for buffer in piece.buffers]
            for device, program in enumerate(self._programs):
                split[device], witness = program.scatter(split[device], piece.blocks, piece.arrays[device])
                piece.witnesses.append(witness)
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            piece.ticket.fail(error)
            self._note_loss(split)

    def _scatter_nothing(self, bucket: int, arrays: Sequence[jax.Array], split: list[Shards]) -> None:
        """Launch the programs of a piece that only other hosts write."""
        try:
            split[:] = split or self._kv.split(arrays)
            nothing = np.zeros((bucket, self._programs[0].width), self._kv.dtype)
            rows = [jax.device_put(nothing, program.sharding) for program in self._programs]
            for device, program in enumerate(self._programs):
                split[device], _ = program.scatter(split[device], (), rows[device])
        except Exception:
            logger.exception("a program that other hosts launch could not be launched here")
            self._note_loss(split)

    def _note_loss(self, split: Sequence[Shards]) -> None:
        if (deleted := _first_deleted(split)) is not None:
            device = self._kv.devices[deleted]
            self.lost = CopyError(f"the KV cache is lost: a program failed after {device} had given it the memory")

    def _rejoined(self, split: Sequence[Shards], arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The arrays for the cell: new ones if scatters have replaced the old ones, unless the cache is lost."""
        if split and _first_deleted(split) is None and any(array.is_deleted() for array in arrays):
            return self._kv.join(split)
        return arrays


def _first_deleted(split: Sequence[Shards]) -> int | None:
    """The number of the first device that has lost a part, or None."""
    return next((number for number, shards in enumerate(split) if any(part.is_deleted() for part in shards)), None)


def _wait(arrays: Sequence[jax.Array]) -> None:
    with suppress(Exception):  # what has failed has ended, too
        jax.block_until_ready(arrays)
