"""The files of a path in memory: with errors, and with power cuts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from random import Random

from kvstow_service.stores.disk.diskfiles import DiskFiles

PIECE = 4096


class FakeFiles(DiskFiles):
    """`power_cut` keeps what was synced, and of each 4 KiB piece any one of the versions since."""

    def __init__(self, data_bytes: int = 0) -> None:
        self.data, self.records = bytearray(data_bytes), bytearray()
        self._pending: dict[str, dict[int, list[bytes]]] = {"data": {}, "records": {}}
        self.on_call: Callable[[str], object] = lambda call: None
        """May raise `OSError`, or look at what has happened so far."""
        self.alignment = PIECE
        self.is_closed = False

    def read_data(self, buffers: Sequence[memoryview], at: int) -> None:
        self.on_call("read_data")
        self._require_aligned(buffers, at)
        for buffer in buffers:
            buffer[:] = self.data[at : at + len(buffer)]
            at += len(buffer)

    def write_data(self, buffers: Sequence[memoryview], at: int) -> None:
        self.on_call("write_data")
        self._require_aligned(buffers, at)
        self._write("data", at, b"".join(bytes(buffer) for buffer in buffers))
        self.on_call("written_data")

    def zero_data(self, at: int, num_bytes: int) -> None:
        self.on_call("zero_data")
        self._write("data", at, bytes(num_bytes))

    def read_records(self, at: int, num_bytes: int) -> bytes:
        self.on_call("read_records")
        return bytes(self.records[at : at + num_bytes]).ljust(num_bytes, b"\0")

    def write_records(self, at: int, data: bytes) -> None:
        self.on_call("write_records")
        self._write("records", at, data)

    def sync(self) -> None:
        self.on_call("sync")
        self._pending = {"data": {}, "records": {}}

    def sync_records(self) -> None:
        self.on_call("sync_records")
        self._pending["records"] = {}

    def resize(self, data_bytes: int, records_bytes: int) -> None:
        self.on_call("resize")
        del self.data[data_bytes:]
        self.data.extend(bytes(data_bytes - len(self.data)))
        self.records.extend(bytes(max(0, records_bytes - len(self.records))))

    def close(self) -> None:
        self.is_closed = True

    def power_cut(self, random: Random) -> FakeFiles:
        """What the next boot finds. Any subset of the pieces written since the last sync, reordered."""
        after = FakeFiles()
        after.data, after.records = bytearray(self.data), bytearray(self.records)
        for name, content in (("data", after.data), ("records", after.records)):
            for piece, versions in self._pending[name].items():
                content[piece * PIECE : (piece + 1) * PIECE] = random.choice(versions)
        return after

    def _write(self, name: str, at: int, data: bytes) -> None:
        content: bytearray = getattr(self, name)
        if at + len(data) > len(content):
            raise OSError(errno.ENOSPC, "behind the end of the file")
        first, last = at // PIECE, (at + len(data) - 1) // PIECE
        pending = self._pending[name]
        for piece in range(first, last + 1):
            pending.setdefault(piece, [bytes(content[piece * PIECE : (piece + 1) * PIECE])])
        content[at : at + len(data)] = data
        for piece in range(first, last + 1):
            pending[piece].append(bytes(content[piece * PIECE : (piece + 1) * PIECE]))

    @staticmethod
    def _require_aligned(buffers: Sequence[memoryview], at: int) -> None:
        if at % PIECE or any(len(buffer) % PIECE for buffer in buffers):
            raise OSError(errno.EINVAL, "direct I/O that is not aligned")
