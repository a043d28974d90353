"""A process that runs Mooncake's library for another one.

    python -m kvstow_service.stores.mooncake.storechild FD [FD...]

Each file descriptor is a lane, served by a thread of its own; the first one connects and adds memory, and when it is
closed the process ends at once, whatever the library is doing.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from kvstow_service.stores.mooncake.childmessages import (
    CORRUPT,
    AddMemory,
    Answer,
    Connect,
    Exists,
    Lane,
    Move,
    RemoveMemory,
    SlotPart,
)
from kvstow_service.stores.mooncake.objectheader import HEADER_BYTES, find_mismatch, pack_header
from kvstow_service.stores.mooncake.objects import MAX_BATCH_OBJECTS


class RegistrationError(Exception):
    """Mooncake did not register the memory."""


class Registered:
    """A piece of memory that Mooncake may read and write. Not locked."""

    def __init__(self, store: MooncakeDistributedStore, fd: int, num_bytes: int, offset: int = 0) -> None:
        """Maps `num_bytes` of `fd` (-1: of no file) from `offset` on, and registers them. Raises `RegistrationError` or
        `OSError`."""
        before = offset % mmap.ALLOCATIONGRANULARITY
        self._store, self.num_bytes = store, num_bytes
        self._map = mmap.mmap(fd, before + num_bytes, offset=offset - before)
        self._bytes = (ctypes.c_char * num_bytes).from_buffer(self._map, before)
        self.address = ctypes.addressof(self._bytes)
        self.view = memoryview(self._map)[before:]
        code = store.register_buffer(self.address, num_bytes)
        if code != 0:
            self._unmap()
            raise RegistrationError(f"Mooncake registered no memory of {num_bytes} bytes: code {code}")

    def close(self) -> None:
        self._store.unregister_buffer(self.address)
        self._unmap()

    def _unmap(self) -> None:
        self.view.release()
        del self._bytes
        self._map.close()


class ChildMemory:
    """All memory of one rank. Ranges come and go on one thread while others use the rest."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store
        self._ranges: dict[int, Registered] = {}

    def add(self, range_id: int, fd: int, num_bytes: int, offset: int) -> None:
        """Raises `RegistrationError` or `OSError`. The caller still owns `fd`."""
        self._ranges[range_id] = Registered(self._store, fd, num_bytes, offset)

    def remove(self, range_id: int) -> None:
        self._ranges.pop(range_id).close()

    def address(self, part: SlotPart) -> int:
        """Of a slot. Raises `LookupError` unless all of it lies in one registered range: with TCP, Mooncake reads and
        writes any address that it is given."""
        found = self._ranges.get(part.range_id)
        if found is None:
            raise LookupError(f"memory range {part.range_id} is not registered")
        if part.offset < 0 or part.num_bytes < 1 or part.offset + part.num_bytes > found.num_bytes:
            raise LookupError(f"{part.num_bytes} bytes at {part.offset} do not lie in a range of {found.num_bytes}")
        return found.address + part.offset

    def view(self, part: SlotPart) -> memoryview:
        return self._ranges[part.range_id].view[part.offset : part.offset + part.num_bytes]


STAGED_BYTES = 256 << 10
"""Slots up to this size are copied, which takes 10 us for 256 KiB. With TCP, Mooncake moves each piece of an object by
a request of its own, and one for a header takes 30 us."""


Pieces = tuple[list[list[int]], list[list[int]]]
"""For each object, the addresses and sizes of its pieces."""


class ObjectBuffers:
    """Room for the headers of one batch, and for its small slots. Not locked: one thread."""

    def __init__(self, store: MooncakeDistributedStore, memory: ChildMemory, num_objects: int) -> None:
        """Takes no memory until a batch uses it. Raises `RegistrationError`."""
        self._memory = memory
        self._headers = Registered(store, -1, num_objects * HEADER_BYTES)
        self._staging = Registered(store, -1, num_objects * (STAGED_BYTES + HEADER_BYTES))

    def fill(self, objects: Sequence[SlotPart]) -> Pieces:
        """The objects, from their slots. Raises `LookupError` for an address that is not registered."""
        pieces = self.place(objects)
        for index, part in enumerate(objects):
            slot = self._memory.view(part)
            header = pack_header(part.fingerprint, part.name, slot)
            if part.num_bytes <= STAGED_BYTES:
                start = _start(index)
                self._staging.view[start : start + part.num_bytes] = slot
                self._staging.view[start + part.num_bytes : start + part.num_bytes + HEADER_BYTES] = header
            else:
                self._headers.view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES] = header
        return pieces

    def place(self, objects: Sequence[SlotPart]) -> Pieces:
        """Where the objects will be. Raises as `fill`, before any is touched."""
        slots = [self._memory.address(part) for part in objects]
        addresses, sizes = list[list[int]](), list[list[int]]()
        for index, (part, slot) in enumerate(zip(objects, slots, strict=True)):
            if part.num_bytes <= STAGED_BYTES:
                addresses.append([self._staging.address + _start(index)])
                sizes.append([part.num_bytes + HEADER_BYTES])
            else:
                addresses.append([slot, self._headers.address + index * HEADER_BYTES])
                sizes.append([part.num_bytes, HEADER_BYTES])
        return addresses, sizes

    def take(self, index: int, part: SlotPart) -> str | None:
        """Verify the object of a batch that was placed, and have it in its slot. What is wrong with it; None if nothing
        is."""
        slot = self._memory.view(part)
        if part.num_bytes > STAGED_BYTES:
            header = bytes(self._headers.view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
            return find_mismatch(header, part.fingerprint, part.name, slot)
        start, end = _start(index), _start(index) + part.num_bytes
        staged = self._staging.view[start:end]
        header = bytes(self._staging.view[end : end + HEADER_BYTES])
        mismatch = find_mismatch(header, part.fingerprint, part.name, staged)
        if mismatch is None:
            slot[:] = staged
        return mismatch


def _start(index: int) -> int:
    return index * (STAGED_BYTES + HEADER_BYTES)


_log = logging.getLogger(__name__)


class StoreClient:
    """A connected store, and the memory that it may use. One thread for each kind of call."""

    def __init__(self, connect: Connect) -> None:
        """Raises `ConnectionError`. The store must not be used then: the library would end the process."""
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            connect.local_host,
            "P2PHANDSHAKE",
            0,  # this process lends the store no memory
            0,  # for calls that copy: there are none
            connect.protocol,
            connect.devices,
            connect.master,
        )
        if code != 0:
            raise ConnectionError(f"Mooncake's client cannot connect to its master at {connect.master}: code {code}")
        self._config = ReplicateConfig()
        self._config.replica_num = connect.replicas
        self._memory = ChildMemory(self._store)
        self._puts = ObjectBuffers(self._store, self._memory, MAX_BATCH_OBJECTS)
        self._gets = ObjectBuffers(self._store, self._memory, MAX_BATCH_OBJECTS)

    def do(self, request: object, fds: Sequence[int]) -> Answer:
        try:
            return tuple(self._do(request, fds))
        except (LookupError, RegistrationError, OSError) as error:
            return str(error)
        finally:
            for fd in fds:
                os.close(fd)

    def _do(self, request: object, fds: Sequence[int]) -> Sequence[int]:
        match request:
            case Move("put", objects):
                names = [part.name for part in objects]
                return list(self._store.batch_put_from_multi_buffers(names, *self._puts.fill(objects), self._config))
            case Move("get", objects):
                return self._get(objects)
            case Exists(names):
                return list(self._store.batch_is_exist(list(names)))
            case AddMemory(range_id, num_bytes, offset):
                self._memory.add(range_id, fds[0], num_bytes, offset)
            case RemoveMemory(range_id):
                self._memory.remove(range_id)
            case _:
                raise LookupError(f"unknown request {request!r}")
        return ()

    def _get(self, objects: Sequence[SlotPart]) -> Sequence[int]:
        names = [part.name for part in objects]
        found = self._store.batch_get_into_multi_buffers(names, *self._gets.place(objects))
        return [
            code if code < 0 else self._verify(part, index, code)
            for index, (part, code) in enumerate(zip(objects, found, strict=True))
        ]

    def _verify(self, part: SlotPart, index: int, num_bytes: int) -> int:
        """0, or `CORRUPT` for an object that was then removed: the store would keep it, and refuse a better one."""
        is_whole = num_bytes == part.num_bytes + HEADER_BYTES
        mismatch = self._gets.take(index, part) if is_whole else "length"
        if mismatch is None:
            return 0
        code = self._store.remove(part.name, True)
        _log.error("object %s is corrupt (%s); removing it: code %d", part.name, mismatch, code)
        return CORRUPT


def serve(lane: Lane, client: StoreClient) -> None:
    """Answer requests until the lane is closed; then end the process."""
    try:
        while True:
            request, fds = lane.receive()
            lane.send(client.do(request, fds))
    except EOFError:
        os._exit(0)
    except Exception:  # noqa: BLE001 - without its answer, the other process waits for nothing
        _log.exception("a lane has failed")
        os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the other process decides
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for fd in map(int, sys.argv[1:]):
        os.set_inheritable(fd, False)
    first, *others = (Lane(socket.socket(fileno=int(text))) for text in sys.argv[1:])
    connect, _ = first.receive()
    try:
        client = StoreClient(connect)
    except (ConnectionError, RegistrationError) as error:
        first.send(str(error))
        os._exit(1)  # the library's own end may hang
    first.send(())
    for lane in others:
        threading.Thread(target=serve, args=(lane, client), daemon=True).start()
    serve(first, client)


if __name__ == "__main__":
    main()
