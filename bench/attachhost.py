"""A control plane behind an attach server, without memory: what a look-up costs over the wire and in process.

`python -m bench.attachhost PATH SLOTS POOL [busy]` prints the figures of calls in process as JSON, listens on PATH, and
ends when its standard input does. POOL is `fresh` or `worn`, as in `bench.subject`; PATH.json says where the prefixes
begin. With `busy`, another thread runs Python code for nine tenths of the time.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from bench.hashes import Hashes
from bench.kvstow_subject import EngineSubject
from bench.subject import CHAIN_BLOCKS, fill, wear
from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    Found,
    Hold,
    LoadBegun,
    Lookup,
    ResetDone,
    StoreBegun,
)
from kvstow.attach.extentcalls import ExtentBytes, ExtentSlots
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.errors import ConflictError
from kvstow.keys import make_key
from kvstow.messages import DesiredState, RankReport
from kvstow.results import Lease
from kvstow_service.node.attachserver import AttachServer
from kvstow_service.node.attachsocket import AttachSocket
from kvstow_service.node.sessionhost import SessionGrant, SessionLink

CALLS = 2000
_BUSY_SECONDS, _REST_SECONDS = 0.009, 0.001


class LookupHost:
    """A `SessionHost` with look-ups, leases and stores of one engine; nothing else is asked of it."""

    def __init__(self, subject: EngineSubject) -> None:
        self._engine = subject.engine
        self._leases: dict[int, Lease] = {}

    def open_session(self, session_id: str, hello: Hello, peer: Peer, link: SessionLink) -> SessionGrant:
        return SessionGrant(self._engine.engine_id, "pool", "namespace")

    def join_worker(self, session_id: str, hello: Hello, peer: Peer) -> None:
        raise ConflictError("no memory here")

    def lookup(self, session_id: str, call: Lookup) -> Found:
        if call.hold == Hold.NOTHING:
            hits = self._engine.lookup(call.keys)
            return Found(0, ((0, hits),) if hits else ())
        lease = self._engine.acquire(call.keys, count=call.counted)
        if not lease.slots:
            return Found(0, ())
        self._leases[lease.lease_id] = lease
        return Found(lease.lease_id, ((0, len(lease.slots)),))

    def release_leases(self, session_id: str, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                self._engine.release_lease(lease)

    def begin_load(self, session_id: str, call: BeginLoad) -> LoadBegun:
        raise ConflictError("no memory here")

    def begin_store(self, session_id: str, call: BeginStore) -> StoreBegun:
        raise ConflictError("no memory here")

    def complete(self, session_id: str, call: Completions) -> None: ...

    def refresh(self, session_id: str, keys: Sequence[bytes]) -> None: ...

    def count_lookup(self, session_id: str, call: CountLookup) -> None: ...

    def reset(self, session_id: str) -> ResetDone:
        return ResetDone("namespace")

    def take_report(self, session_id: str, rank: int, report: RankReport) -> DesiredState:
        return self._engine.report(report)

    def extents_registered(self, session_id: str, rank: int, extents: Sequence[ExtentSlots]) -> None: ...

    def extents_released(self, session_id: str, rank: int, extent_ids: Sequence[int]) -> None: ...

    def take_back(self, session_id: str, rank: int, extents: Sequence[ExtentBytes], fds: Sequence[int]) -> list[int]:
        raise ConflictError("no memory here")

    def session_lost(self, session_id: str, reason: str) -> None: ...

    def worker_let_go(self, session_id: str, rank: int) -> None: ...

    def session_over(self, session_id: str) -> None: ...


def chains(slots: int, starts: Sequence[int]) -> Callable[[int], list[bytes]]:
    """Keys of a prefix, another one each time, and new objects."""
    hashes, choose = Hashes(3 * slots), Random(1)

    def chain(number: int) -> list[bytes]:
        return [make_key(0, block_hash) for block_hash in hashes.run(choose.choice(starts), CHAIN_BLOCKS)]

    return chain


def filled(slots: int, *, worn: bool) -> tuple[EngineSubject, list[int]]:
    """A full pool, and the first blocks of the prefixes in it."""
    subject, hashes = EngineSubject(slots), Hashes(3 * slots)
    fill(subject, hashes, slots)
    return subject, wear(subject, hashes, slots)[0] if worn else list(range(0, slots, CHAIN_BLOCKS))


def timed(call: Callable[[list[bytes]], object], chain: Callable[[int], list[bytes]], calls: int) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for number in range(calls):
        keys = chain(number)
        begun = time.perf_counter()
        call(keys)
        seconds.append(time.perf_counter() - begun)
    return seconds


def keep_busy(stop: threading.Event) -> None:
    document = {str(number): list(range(20)) for number in range(50)}
    while not stop.is_set():
        end = time.perf_counter() + _BUSY_SECONDS
        while time.perf_counter() < end:
            json.loads(json.dumps(document))
        stop.wait(_REST_SECONDS)


def main(path: str, slots: int, *, worn: bool, busy: bool) -> None:
    subject, starts = filled(slots, worn=worn)
    chain = chains(slots, starts)
    Path(f"{path}.json").write_text(json.dumps(starts))
    gc.collect()
    gc.freeze()
    found = {} if busy else {"lookup": timed(subject.lookup, chain, CALLS), "use": timed(subject.use, chain, CALLS)}
    attach_socket = AttachSocket(Path(path))
    server = AttachServer(LookupHost(subject), attach_socket.listener)
    server.start()
    stop = threading.Event()
    thread = threading.Thread(target=keep_busy, args=(stop,))
    if busy:
        thread.start()
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    stop.set()
    if busy:
        thread.join()
    server.close()
    attach_socket.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), worn="worn" in sys.argv[3:], busy="busy" in sys.argv[3:])
