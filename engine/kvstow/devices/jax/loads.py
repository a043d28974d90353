"""Loads: the copy thread stages their bytes on the devices, the host's thread launches what writes the blocks.

A load needs no fence either: the scatter replaces the arrays that the last step returned, so it follows all older
programs on them, and the next step follows it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import jax

from kvstow.devices.base import TicketState
from kvstow.devices.jax.cell import KVCell
from kvstow.devices.jax.inflight import BytesInFlight, Held
from kvstow.devices.jax.loadbuffers import LoadBuffer
from kvstow.devices.jax.programs import DevicePrograms, pieces_of
from kvstow.devices.jax.rangecopier import CopyJob, Range, RangeCopier
from kvstow.devices.jax.shards import ShardedKV, Shards
from kvstow.errors import CopyError

Buffers = Sequence[LoadBuffer]
"""One for each device, all of one size."""


class LoadTicket:
    """A `Ticket`; `Loads.advance` moves it on. `slots`: their addresses. `most`: blocks in a piece."""

    def __init__(self, blocks: Sequence[int], slots: Sequence[int], most: int) -> None:
        pieces = [slice(piece.start, piece.stop) for piece in pieces_of(len(blocks), most)]
        self.unstaged = deque((blocks[piece], slots[piece]) for piece in reversed(pieces))  # ends with small ones
        self.num_pieces = len(self.unstaged)
        self.num_filling = self.num_launched = self.num_written = 0
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

    def poll(self) -> TicketState:
        if not self.has_ended:
            return TicketState.PENDING
        return TicketState.DONE if self.error is None else TicketState.FAILED


class LoadPiece:
    """Some blocks of a load: a job fills the buffers, then they are in arrays of each device. `witnesses`: of the
    programs that were launched."""

    def __init__(self, ticket: LoadTicket, blocks: Sequence[int], buffers: Buffers, job: CopyJob, held: Held) -> None:
        self.ticket, self.blocks, self.buffers, self.job = ticket, blocks, buffers, job
        self.arrays: list[jax.Array] = []
        self.witnesses: list[jax.Array] = []
        self._held = held

    def is_uploaded(self) -> bool:
        return all(array.is_ready() for array in self.arrays)

    def is_written(self) -> bool:
        return all(witness.is_ready() for witness in self.witnesses)


class Loads:
    """All loads of a rank. `launch` belongs to the host's thread, the others to the copy thread."""

    def __init__(
        self,
        kv: ShardedKV,
        cell: KVCell,
        programs: Sequence[DevicePrograms],
        copier: RangeCopier,
        buffers: Sequence[Buffers],
        in_flight: BytesInFlight,
    ) -> None:
        """`buffers`: in ascending order."""
        self._kv, self._cell, self._programs = kv, cell, programs
        self._in_flight, self._copier = in_flight, copier
        self._buffers = list(buffers)  # free ones
        self._tickets: list[LoadTicket] = []
        self._filling: deque[LoadPiece] = deque()
        self._uploading: deque[LoadPiece] = deque()
        self._staged: deque[LoadPiece] = deque()
        self._launched: deque[LoadPiece] = deque()
        self.lost: BaseException | None = None
        """Why the KV cache is gone."""

    def launch(self) -> None:
        """Launch the scatters of all pieces that are staged, in the order of the plans."""
        if not self._staged:
            return
        arrays = self._cell.take()
        split: list[Shards] = []
        try:
            while self._staged:
                piece = self._staged.popleft()
                piece.ticket.num_launched += 1
                if self.lost is not None:
                    piece.ticket.fail(self.lost)
                if piece.ticket.error is None:
                    self._scatter(piece, arrays, split)
                self._launched.append(piece)
        finally:
            self._cell.put(self._rejoined(split, arrays))

    def queue(self, ticket: LoadTicket) -> None:
        self._tickets.append(ticket)

    def advance(self) -> bool:
        """Begin to stage one piece, and move on those under way; False if there is nothing to do, or no memory for it.
        Raises if the KV cache is lost."""
        self._end_written()
        if self.lost is not None:
            raise self.lost
        filled = bool(self._filling) and self._filling[0].job.has_ended
        while self._filling and self._filling[0].job.has_ended:
            self._begin_upload(self._filling.popleft())
        while self._uploading and self._uploading[0].is_uploaded():
            self._end_upload(self._uploading.popleft())
        self._tickets = [ticket for ticket in self._tickets if not ticket.has_ended]
        unstaged = (ticket for ticket in self._tickets if ticket.unstaged and ticket.error is None)
        return next(map(self._stage, unstaged), False) or filled

    def fail_unlaunched(self, error: BaseException) -> None:
        """The host launches nothing more."""
        for ticket in self._tickets:
            if ticket.num_launched < ticket.num_pieces:
                ticket.fail(error)

    def close(self) -> None:
        """Wait for the programs and transfers under way: they use the buffers and write the blocks. The copier has been
        closed: nothing reads the pool's slots."""
        for piece in (*self._uploading, *self._staged, *self._launched):
            _wait(piece.arrays)
            _wait(piece.witnesses)
        for pieces in (self._filling, self._uploading, self._staged, self._launched):
            pieces.clear()
        self._tickets.clear()
        self._buffers.clear()

    def _stage(self, ticket: LoadTicket) -> bool:
        """False if there is no memory."""
        blocks, slots = ticket.unstaged[0]
        buffers = next((buffers for buffers in self._buffers if buffers[0].bucket >= len(blocks)), None)
        if buffers is None:
            return False
        held = self._in_flight.take(buffers[0].bucket * self._kv.layout.slot_bytes)
        if held is None:
            return False
        ticket.unstaged.popleft()
        ticket.began = ticket.began or time.perf_counter()
        self._buffers.remove(buffers)
        try:
            job = self._copier.start(self._ranges(buffers, slots))
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            ticket.fail(error)
            self._free(buffers)
            return True
        ticket.num_filling += 1
        self._filling.append(LoadPiece(ticket, blocks, buffers, job, held))
        return True

    def _begin_upload(self, piece: LoadPiece) -> None:
        piece.ticket.num_filling -= 1
        try:
            piece.job.result()
            if piece.ticket.error is None:
                piece.arrays = [buffer.upload() for buffer in piece.buffers]
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            piece.ticket.fail(error)
        if piece.ticket.error is None:
            self._uploading.append(piece)
        else:
            _wait(piece.arrays)
            self._free(piece.buffers)

    def _ranges(self, buffers: Buffers, slots: Sequence[int]) -> list[Range]:
        ranges: list[Range] = []
        size = self._kv.part_bytes
        for device, buffer in enumerate(buffers):
            part = device * size
            ranges += [Range(buffer.address + row * size, slot + part, size) for row, slot in enumerate(slots)]
        return ranges

    def _end_upload(self, piece: LoadPiece) -> None:
        piece.ticket.seconds = time.perf_counter() - (piece.ticket.began or 0.0)
        if piece.buffers[0].free_after_upload:
            self._free(piece.buffers)
        self._staged.append(piece)

    def _end_written(self) -> None:
        while self.lost is None and self._launched and self._launched[0].is_written():
            piece = self._launched.popleft()
            try:
                jax.block_until_ready(piece.witnesses)
            except Exception as error:  # noqa: BLE001 - `advance` raises it
                self.lost = CopyError(f"the KV cache is lost: a program that writes it has failed: {error}")
                return
            if not piece.buffers[0].free_after_upload:
                piece.arrays.clear()
                self._free(piece.buffers)
            piece.ticket.num_written += 1

    def _free(self, buffers: Buffers) -> None:
        self._buffers.append(buffers)
        self._buffers.sort(key=lambda free: free[0].bucket)

    def _scatter(self, piece: LoadPiece, arrays: Sequence[jax.Array], split: list[Shards]) -> None:
        """Write the blocks of a piece on all devices. `split`: `arrays` by device, filled by the first piece; the
        memory of those that are written passes to new ones. After an error each device has its part of the KV cache,
        with the blocks written or not, or the cache is lost."""
        try:
            split[:] = split or self._kv.split(arrays)
            for device, program in enumerate(self._programs):
                split[device], witness = program.scatter(split[device], piece.blocks, piece.arrays[device])
                piece.witnesses.append(witness)
        except Exception as error:  # noqa: BLE001 - the failure of one op, in its ticket
            piece.ticket.fail(error)
            if (deleted := _first_deleted(split)) is not None:
                device = self._kv.devices[deleted]
                self.lost = CopyError(f"the KV cache is lost: a program failed after {device} had given it the memory")

    def _rejoined(self, split: Sequence[Shards], arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The arrays after scatters: new ones if there were any, unless the cache is lost."""
        if split and _first_deleted(split) is None and any(array.is_deleted() for array in arrays):
            return self._kv.join(split)
        return arrays


def _first_deleted(split: Sequence[Shards]) -> int | None:
    """The first device that has lost a part."""
    return next((number for number, shards in enumerate(split) if any(part.is_deleted() for part in shards)), None)


def _wait(arrays: Sequence[jax.Array]) -> None:
    with suppress(Exception):  # what has failed has ended, too
        jax.block_until_ready(arrays)
