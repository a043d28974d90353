"""A process that runs Mooncake's library for another one.

    python -m kvstow_service.stores.mooncake.storechild FD [FD...]

Each file descriptor is a lane with a thread of its own. The requests to connect and to add memory come on the first
lane. When a lane is closed, the process ends at once, whatever the library is doing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from kvstow_service.stores.messagesocket import MessageSocket
from kvstow_service.stores.mooncake.childmessages import (
    CORRUPT,
    AddMemory,
    Answer,
    Connect,
    Exists,
    Move,
    RemoveMemory,
)
from kvstow_service.stores.mooncake.objectbuffers import ChildMemory, ObjectBuffers, RegistrationError
from kvstow_service.stores.mooncake.objectheader import HEADER_BYTES
from kvstow_service.stores.mooncake.objects import MAX_BATCH_OBJECTS, SlotObject

_log = logging.getLogger("kvstow.tier")


class StoreClient:
    """A connected store, and the memory that it may use. Each kind of call has one thread."""

    def __init__(self, connect: Connect) -> None:
        """Connect to the store. Raises `ConnectionError`. After that the store must not be used, because the library
        would end the process."""
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            connect.local_host,
            "P2PHANDSHAKE",
            0,  # this process lends the store no memory
            0,  # the buffer for calls that copy, which are not used
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
                names = [str(part.name) for part in objects]
                return list(self._store.batch_put_from_multi_buffers(names, *self._puts.fill(objects), self._config))
            case Move("get", objects):
                return self._get(objects)
            case Exists(names):
                return list(self._store.batch_is_exist(list(names)))
            case AddMemory(range_id, num_bytes):
                self._memory.add(range_id, fds[0], num_bytes)
            case RemoveMemory(range_id):
                self._memory.remove(range_id)
            case _:
                raise LookupError(f"unknown request {request!r}")
        return ()

    def _get(self, objects: Sequence[SlotObject]) -> Sequence[int]:
        names = [str(part.name) for part in objects]
        found = self._store.batch_get_into_multi_buffers(names, *self._gets.place(objects))
        return [
            code if code < 0 else self._verify(part, index, code)
            for index, (part, code) in enumerate(zip(objects, found, strict=True))
        ]

    def _verify(self, part: SlotObject, index: int, num_bytes: int) -> int:
        """Return 0, or `CORRUPT` for a corrupt object. This removes a corrupt object, because the store would keep it
        and refuse a better one."""
        is_whole = num_bytes == part.num_bytes + HEADER_BYTES
        mismatch = self._gets.take(index, part) if is_whole else "length"
        if mismatch is None:
            return 0
        code = self._store.remove(str(part.name), True)
        _log.error("object %s is corrupt (%s); removing it: code %d", part.name, mismatch, code)
        return CORRUPT


def serve(lane: MessageSocket, client: StoreClient) -> None:
    """Answer requests until the lane is closed, and then end the process."""
    try:
        while True:
            request, fds = lane.receive()
            lane.send(client.do(request, fds))
    except EOFError:
        os._exit(0)
    except Exception:  # noqa: BLE001 - the other process would wait in vain for an answer
        _log.exception("a lane has failed")
        os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the other process decides when this one ends
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    first, *others = (MessageSocket.inherited(int(text)) for text in sys.argv[1:])
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
