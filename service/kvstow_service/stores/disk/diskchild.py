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
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue

from kvstow.memfd import create_memfd
from kvstow_service.stores.disk.blockfile import BlockFile, BlockPart, boot_id
from kvstow_service.stores.disk.diskfiles import DiskFiles, PathBusyError, PathError, facts_of, open_folder
from kvstow_service.stores.disk.diskformat import FormatError, padded
from kvstow_service.stores.disk.diskmessages import (
    THREADS,
    AddExtent,
    BlockAt,
    ChangeFiles,
    CloseFiles,
    Done,
    MoveBlocks,
    Open,
    Opened,
    Problem,
    RemoveExtent,
    Result,
)
from kvstow_service.stores.messagesocket import MessageSocket

_log = logging.getLogger("kvstow.disk")

_FIRST_PAUSE, _PAUSE_SECONDS = 0.1, 5.0


class MappedExtents:
    """Memory of the service's pools. An extent that a thread still uses is unmapped when the thread gives it back."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._leaving: dict[int, Callable[[], object]] = {}

    def add(self, extent: int, fd: int, num_bytes: int) -> None:
        """Map an extent. The caller keeps the descriptor. Raises `OSError`."""
        self._maps[extent] = mmap.mmap(fd, num_bytes)

    def remove(self, extent: int, then: Callable[[], object]) -> None:
        """Unmap an extent, and call `then`."""
        with self._lock:
            self._leaving[extent] = then
        self._unmap()

    def borrow(self, block: BlockAt) -> list[BlockPart]:
        """Return the parts of a block, which stay mapped until `give_back`. Raises `LookupError` unless each part lies
        in a mapped extent, because a block that is cut off would be written as if it were whole."""
        with self._lock:
            return [self._part(*part) for part in block.parts]

    def _part(self, extent: int, offset: int, num_bytes: int) -> BlockPart:
        mapped, end = self._maps[extent], offset + padded(num_bytes, self._alignment)
        if not 0 <= offset < end <= len(mapped):
            raise LookupError(f"extent {extent} has {len(mapped)} bytes, none at {offset} to {end}")
        return BlockPart(memoryview(mapped)[offset:end], num_bytes)

    def give_back(self, parts: Sequence[BlockPart]) -> None:
        for part in parts:
            part.buffer.release()
        if self._leaving:
            self._unmap()

    def _unmap(self) -> None:
        calls: list[Callable[[], object]] = []
        with self._lock:
            for extent in list(self._leaving):
                try:
                    self._maps[extent].close()
                except BufferError:  # a thread uses it
                    continue
                del self._maps[extent]
                calls.append(self._leaving.pop(extent))
        for call in calls:
            call()


class DiskChild:
    def __init__(self, link: MessageSocket, block_file: BlockFile) -> None:
        self._link, self._file = link, block_file
        self._extents = MappedExtents(block_file.header.alignment)
        self._queues = {kind: SimpleQueue[MoveBlocks | ChangeFiles | None]() for kind in THREADS}
        self._threads = [
            threading.Thread(target=self._work, args=(self._queues[kind],), daemon=True)
            for kind, count in THREADS.items()
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
                case CloseFiles():
                    for queue in self._queues.values():
                        queue.put(None)
                    for thread in self._threads:
                        thread.join()
                    self._file.close()
                    os._exit(0)
                case _:
                    self._queues[request.kind].put(request)

    def _work(self, queue: SimpleQueue[MoveBlocks | ChangeFiles | None]) -> None:
        try:
            while (request := queue.get()) is not None:
                answer = self._move(request) if isinstance(request, MoveBlocks) else self._change(request)
                with suppress(EOFError):  # the first thread notices it, too
                    self._link.send(answer)
            queue.put(None)  # for the next thread
        except BaseException:  # noqa: BLE001 - the service would wait for an answer
            _log.exception("a thread has failed")
            os._exit(1)

    def _change(self, request: ChangeFiles) -> Done:
        try:
            request.method(self._file, *request.arguments)
        except OSError as error:
            return Done(request.number, error=str(error))
        return Done(request.number)

    def _move(self, request: MoveBlocks) -> Done:
        """Read or write blocks. The first error of the disk ends this, so the blocks after it are not touched."""
        results: list[Result] = []
        error = ""
        for block in request.blocks:
            try:
                results.append("failed" if error else self._move_block(block, is_read=request.kind == "read"))
            except OSError as found:
                error = str(found)
                results.append("failed")
        return Done(request.number, tuple(results), error)

    def _move_block(self, block: BlockAt, *, is_read: bool) -> Result:
        parts = self._extents.borrow(block)
        try:
            if is_read:
                return self._file.read(block.place, block.name, parts)
            return "written" if self._file.write(block.place, block.name, parts, self._is_served) else "failed"
        finally:
            self._extents.give_back(parts)

    def _is_served(self) -> bool:
        """Whether the service still lives, so that the slots are still lent to this process. Another service uses no
        slot before this one has ended."""
        poll = select.poll()
        poll.register(self._link.end, select.POLLHUP | select.POLLRDHUP)
        return not poll.poll(0)


def _open(link: MessageSocket, opening: Open) -> BlockFile:
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


def _open_once(link: MessageSocket, opening: Open) -> BlockFile:
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
    link = MessageSocket.inherited(int(sys.argv[1]))
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
