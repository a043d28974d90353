"""The process that does all reading and writing of one path.

    python -m kvstow_service.stores.disk.diskchild FD

The first thread handles the requests about memory, and never waits for the disk once the files are open. Other threads
handle all other requests. When the socket is closed, the process ends at once. If the disk hangs, it ends when the disk
goes on. Until then, no other process can have the files.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, assert_never

from kvstow.memfd import create_memfd
from kvstow_service.stores.disk.blockfile import BlockFile, BlockPart, boot_id
from kvstow_service.stores.disk.diskfiles import DiskFiles, PathBusyError, PathError, facts_of, open_folder
from kvstow_service.stores.disk.diskformat import FormatError
from kvstow_service.stores.disk.diskmessages import (
    AddExtent,
    AddNamespace,
    Assign,
    BlockAt,
    CloseFiles,
    DiskSocket,
    Done,
    MarkDirty,
    MoveBlocks,
    Open,
    Opened,
    Overwrite,
    ProbeFiles,
    Problem,
    RemoveExtent,
    Request,
    Result,
    Sync,
    WriteUses,
)

_log = logging.getLogger("kvstow.disk")

READERS: Final = 8
WRITERS: Final = 4
_KEEPERS = 2
"""How many threads do work that an answer waits for, such as a purge. One more thread does the other work."""
_FIRST_PAUSE, _PAUSE_SECONDS = 0.1, 5.0


class MappedExtents:
    """Memory of the service's pools. An extent that a thread still uses is unmapped when the thread gives it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._users: Counter[int] = Counter()
        self._leaving: dict[int, Callable[[], object]] = {}

    def add(self, extent: int, fd: int, num_bytes: int) -> None:
        """Map an extent. The caller keeps the descriptor. Raises `OSError`."""
        self._maps[extent] = mmap.mmap(fd, num_bytes)

    def remove(self, extent: int, then: Callable[[], object]) -> None:
        with self._lock:
            if self._users[extent]:
                self._leaving[extent] = then
                return
            self._unmap(extent)
        then()

    def borrow(self, block: BlockAt, alignment: int) -> list[BlockPart]:
        """Return the parts of a block, which stay mapped until `give_back`. Raises `LookupError` for an extent that is
        not mapped, or is too small."""
        found: list[BlockPart] = []
        with self._lock:
            for part in block.parts:
                end = part.offset + -(-part.num_bytes // alignment) * alignment
                if part.extent not in self._maps or part.extent in self._leaving or end > len(self._maps[part.extent]):
                    raise LookupError(f"extent {part.extent} does not have {end} bytes")
                found.append(BlockPart(memoryview(self._maps[part.extent])[part.offset : end], part.num_bytes))
            self._users.update(part.extent for part in block.parts)
        return found

    def give_back(self, block: BlockAt, parts: Sequence[BlockPart]) -> None:
        calls: list[Callable[[], object]] = []
        for part in parts:
            part.buffer.release()
        with self._lock:
            for extent in [part.extent for part in block.parts]:
                self._users[extent] -= 1
                if not self._users[extent] and extent in self._leaving:
                    calls.append(self._leaving.pop(extent))
                    self._unmap(extent)
        for call in calls:
            call()

    def _unmap(self, extent: int) -> None:
        found = self._maps.pop(extent, None)
        if found is not None:
            found.close()


class DiskChild:
    def __init__(self, link: DiskSocket, block_file: BlockFile) -> None:
        self._link, self._file = link, block_file
        self._extents = MappedExtents()
        self._reads, self._writes = SimpleQueue[Request | None](), SimpleQueue[Request | None]()
        self._urgent, self._others = SimpleQueue[Request | None](), SimpleQueue[Request | None]()
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), daemon=True)
            for queue, count in (
                (self._reads, READERS),
                (self._writes, WRITERS),
                (self._urgent, _KEEPERS),
                (self._others, 1),
            )
            for _ in range(count)
        ]

    def serve(self) -> None:
        """Handle requests until the service closes its end. Then it raises `EOFError`."""
        for thread in self._threads:
            thread.start()
        while True:
            request, fds = self._link.receive()
            match request:
                case AddExtent(extent, num_bytes):
                    self._extents.add(extent, fds[0], num_bytes)
                    os.close(fds[0])
                case RemoveExtent(number, extent):
                    self._extents.remove(extent, lambda number=number: self._link.send(Done(number)))  # type: ignore[misc]
                case MoveBlocks():
                    (self._reads if request.direction == "read" else self._writes).put(request)
                case Overwrite() | Sync() | WriteUses():
                    self._others.put(request)
                case CloseFiles():
                    self._close()
                case _:
                    self._urgent.put(request)

    def _close(self) -> None:
        for queue, count in (
            (self._reads, READERS),
            (self._writes, WRITERS),
            (self._urgent, _KEEPERS),
            (self._others, 1),
        ):
            for _ in range(count):
                queue.put(None)
        for thread in self._threads:
            thread.join()
        self._file.close()
        os._exit(0)

    def _work(self, queue: SimpleQueue[Request | None]) -> None:
        try:
            while (request := queue.get()) is not None:
                self._link.send(self._answer(request))
        except BaseException:  # noqa: BLE001 - without this thread, the service would wait for an answer
            _log.exception("a thread has failed")
            os._exit(1)

    def _answer(self, request: Any) -> Done:
        if isinstance(request, MoveBlocks):
            return self._move(request)
        try:
            self._do(request)
        except OSError as error:
            return Done(request.number, error=str(error))
        return Done(request.number)

    def _do(self, request: Assign | AddNamespace | MarkDirty | Overwrite | WriteUses | Sync | ProbeFiles) -> None:
        match request:
            case Assign():
                self._file.assign(request.assignment)
            case AddNamespace():
                self._file.add_namespace(request.row, request.entry)
            case MarkDirty():
                self._file.mark_dirty(request.places)
            case Overwrite():
                self._file.overwrite(request.places, request.place_bytes)
            case WriteUses():
                self._file.write_uses(request.chunk, request.first, request.times)
            case Sync():
                self._file.sync()
                if self._file.are_removed():
                    _log.error("somebody has removed its files: it begins anew with empty ones")
                    os._exit(1)  # the service starts another process, which creates files
            case ProbeFiles():
                self._file.probe()
            case _:
                assert_never(request)

    def _move(self, request: MoveBlocks) -> Done:
        """Read or write blocks. The first error of the disk ends this, so the blocks after it are not touched."""
        results: list[Result] = []
        error = ""
        for block in request.blocks:
            if error:
                results.append("failed")
                continue
            try:
                results.append(self._move_block(request.direction, block))
            except OSError as found:
                error = str(found)
                results.append("failed")
        return Done(request.number, tuple(results), error)

    def _move_block(self, direction: str, block: BlockAt) -> Result:
        parts = self._extents.borrow(block, self._file.header.alignment)
        try:
            if direction == "read":
                return self._file.read(block.place, block.name, parts)
            return "written" if self._file.write(block.place, block.name, parts, self._is_served) else "failed"
        finally:
            self._extents.give_back(block, parts)

    def _is_served(self) -> bool:
        """Whether the service still lives, so that the slots are still lent to this process. Another service uses no
        slot before this one has ended."""
        poll = select.poll()
        poll.register(self._link.end, select.POLLHUP | select.POLLRDHUP)
        return not poll.poll(0)


def _open(link: DiskSocket, opening: Open) -> BlockFile:
    """Try until the files are open, and report to the service why they are not."""
    pause = _FIRST_PAUSE
    while True:
        try:
            return _open_once(link, opening)
        except PathBusyError as error:
            problem = Problem("in use", str(error))
        except (PathError, FormatError, OSError) as error:
            problem, pause = Problem("failed", str(error)), _PAUSE_SECONDS
        if pause >= _PAUSE_SECONDS:
            link.send(problem)
        poll = select.poll()
        poll.register(link.end, select.POLLIN)
        if poll.poll(pause * 1000):
            os._exit(0)  # the service sends no request before the files are open, so it has closed its end
        pause = min(2 * pause, _PAUSE_SECONDS)


def _open_once(link: DiskSocket, opening: Open) -> BlockFile:
    with ExitStack() as undo:
        folder = open_folder(Path(opening.path))
        undo.callback(os.close, folder)
        facts = facts_of(folder)
        if opening.size_bytes is None and facts.default_bytes is None:
            raise PathError("it is on the root file system, where a size has to be given")
        files = DiskFiles(folder)
        with ExitStack() as undo_files:
            undo_files.callback(files.close)
            block_file = BlockFile.open(files, opening.size_bytes, facts.default_bytes or 0, files.alignment, boot_id())
            data = pickle.dumps(block_file.load())
            undo_files.pop_all()
    fd = create_memfd("kvstow-disk-records", len(data))
    os.pwrite(fd, data, 0)
    link.send(Opened(len(data), facts.total_bytes), fd)
    os.close(fd)
    return block_file


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the service decides when this process ends
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    link = DiskSocket(socket.socket(fileno=fd))
    try:
        opening, _ = link.receive()
        DiskChild(link, _open(link, opening)).serve()
    except EOFError:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - threads that wait for the disk must not keep the process
        _log.exception("the process of a disk has failed")
        os._exit(1)


if __name__ == "__main__":
    main()
