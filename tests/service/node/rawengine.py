"""An engine over bare connections to a real `Node`: scheduler half and workers in the test's own thread.

Run as a program it attaches, stores and waits to be killed: `python rawengine.py PATH NUM_KEYS`.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace
from tests.doubles.rank import ready_report

from kvstow.attach.calls import (
    Admit,
    BeginLoad,
    BeginStore,
    Completions,
    End,
    ExtentGrant,
    ExtentSlots,
    Found,
    GrantedExtents,
    Hold,
    LoadBegun,
    Lookup,
    PopulatedExtents,
    RegisteredExtents,
    Release,
    ReleasedExtents,
    Report,
    RevokedExtents,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import Hello
from kvstow.attach.identity import FleetWeights, GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.wire import Kind, Message
from kvstow.hints import Hints
from kvstow.messages import Completion

SLOT_BYTES = 64 << 10
DEADLINE_SECONDS = 60.0

POOL = PoolIdentity(
    slot_bytes=(SLOT_BYTES, SLOT_BYTES),
    regions=(RegionIdentity("layer.0", SLOT_BYTES),),
    kv_cache_dtype="bfloat16",
    groups=(GroupIdentity("full", 16, 16),),
    tensor_parallel=2,
)
NAMESPACE = NamespaceIdentity(model="org/Model-1", weights_id="w", weights_source="snapshot", hash_probe="p")
HELLO = Hello(role="scheduler", engine="raw", host="here", pid=os.getpid(), pool=POOL, namespace=NAMESPACE)

NAMED = replace(HELLO, fleet_weights=FleetWeights("digest 1"))
"""Of an engine whose blocks a store below the pools may have."""

_M = TypeVar("_M", bound=Message)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys_of(first: int, count: int) -> list[bytes]:
    return [key_of(number) for number in range(first, first + count)]


def content_of(key: bytes, rank: int) -> bytes:
    return (key + bytes([rank])) * (SLOT_BYTES // 33) + b"." * (SLOT_BYTES % 33)


class RawWorker:
    """The worker of a rank, which maps all that it is sent."""

    def __init__(
        self,
        path: Path,
        token: str,
        rank: int,
        boot: str = "boot",
        settled_tokens: tuple[str, ...] = (),
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        hello = Hello(
            role="worker",
            engine="raw",
            host="here",
            pid=os.getpid(),
            token=token,
            rank=rank,
            settled_tokens=settled_tokens,
        )
        self.rank, self.boot, self.slot_bytes = rank, boot, slot_bytes
        self.connection = AttachConnection(path, lambda: hello, accepts_fds=True)
        self.grants: dict[int, ExtentGrant] = {}
        self.maps: dict[int, mmap.mmap] = {}
        self.fds: dict[int, int] = {}
        self.populated: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.revoked: list[int] = []
        self.holds_revoked = False
        self.reports = 0

    def step(self, seconds: float = 0.002) -> None:
        for frame in self.connection.poll(seconds):
            if frame.kind == Kind.EXTENTS:
                granted = GrantedExtents.unpack(frame.payload)
                assert granted.slot_stride == self.slot_bytes
                for grant, fd in zip(granted.extents, frame.fds, strict=True):
                    self.grants[grant.extent_id] = grant
                    self.maps[grant.extent_id] = mmap.mmap(fd, grant.num_bytes)
                    self.populated[grant.extent_id] = grant.populated_bytes
                    self.fds[grant.extent_id] = fd
            elif frame.kind == Kind.POPULATED:
                self.populated |= dict(PopulatedExtents.unpack(frame.payload).extents)
            elif frame.kind == Kind.REVOKED:
                self.revoked += RevokedExtents.unpack(frame.payload).extent_ids
        if self.connection.state == "attached":
            if not self.reports:
                self.report()
            self.register()
        if self.revoked and not self.holds_revoked:  # also if the connection has ended behind the message
            self.let_go()

    def register(self) -> None:
        """Everything that is populated."""
        news = []
        for extent_id, grant in self.grants.items():
            slots = min(grant.num_slots, self.populated[extent_id] // self.slot_bytes)
            if self.registered.get(extent_id, 0) < slots:
                self.registered[extent_id] = slots
                news.append(ExtentSlots(extent_id, slots))
        if news:
            self.connection.send(RegisteredExtents(tuple(news)))

    def let_go(self) -> None:
        for extent_id in self.revoked:
            self.maps.pop(extent_id).close()
            os.close(self.fds.pop(extent_id))
            del self.grants[extent_id], self.populated[extent_id]
            self.registered.pop(extent_id, None)
        self.connection.send(ReleasedExtents(tuple(self.revoked)))
        self.revoked.clear()

    def report(self) -> None:
        self.reports += 1
        many = 10**9  # not believed
        report = ready_report(
            self.slot_bytes, 0, rank=self.rank, boot_id=self.boot, pinned_slots=many, sender="raw", number=self.reports
        )
        self.connection.call(Report(report))

    def place_of(self, slot: int) -> tuple[mmap.mmap, int]:
        for extent_id, grant in self.grants.items():
            if grant.first_slot <= slot < grant.first_slot + grant.num_slots:
                offset = (slot - grant.first_slot) * self.slot_bytes
                assert offset + self.slot_bytes <= self.populated[extent_id], "a slot that is not populated"
                return self.maps[extent_id], offset
        raise AssertionError(f"slot {slot} lies in no extent of rank {self.rank}")

    def write(self, slot: int, content: bytes) -> None:
        memory, offset = self.place_of(slot)
        memory[offset : offset + self.slot_bytes] = content

    def read(self, slot: int) -> bytes:
        memory, offset = self.place_of(slot)
        return memory[offset : offset + self.slot_bytes]

    def close(self) -> None:
        self.connection.close()
        for memory in self.maps.values():
            memory.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class RawEngine:
    """An attached engine. Each call steps all connections until it has its result."""

    def __init__(
        self, path: Path, hello: Hello = HELLO, settled_tokens: tuple[str, ...] = (), *, ranks: int = 1000
    ) -> None:
        """`settled_tokens`: of sessions in which this process has no copies under way any more. `ranks`: how many of
        the workers attach."""
        self.path = path
        self.settled: dict[int, str] = {}
        self._last_request = 0
        self.scheduler = AttachConnection(path, lambda: hello)
        self.workers: list[RawWorker] = []
        self.wait_for(lambda: self.scheduler.state == "attached")
        assert self.scheduler.welcome is not None
        self.welcome = self.scheduler.welcome
        assert hello.pool is not None
        self.workers = [
            RawWorker(path, self.welcome.token, rank, settled_tokens=settled_tokens, slot_bytes=slot_bytes)
            for rank, slot_bytes in enumerate(hello.pool.slot_bytes[:ranks])
        ]
        self.wait_for(lambda: all(worker.connection.state == "attached" for worker in self.workers))

    def step(self, worker_seconds: float = 0.002) -> None:
        for frame in self.scheduler.poll(0.002):
            if frame.kind == Kind.SETTLED:
                for op in SettledOps.unpack(frame.payload).ops:
                    self.settled[op.op_id] = op.mark
        for worker in self.workers:
            worker.step(worker_seconds)

    def wait_for(self, condition: Callable[[], object], worker_seconds: float = 0.002) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"the condition did not come true; {self.scheduler.problem}"
            self.step(worker_seconds)

    def ask(self, message: Message, kind: type[_M]) -> _M:
        call = self.scheduler.call(message)
        self.wait_for(lambda: call.done, worker_seconds=0.0)
        return call.unpack(kind)

    def begin_store(self, keys: Sequence[bytes]) -> StoreBegun:
        begun = self.ask(BeginStore(keys), StoreBegun)
        for index, slot in zip(begun.accepted, begun.slots, strict=True):
            for worker in self.workers:
                worker.write(slot, content_of(keys[index], worker.rank))
        return begun

    def complete(self, op_id: int, mark: str = "done") -> None:
        for worker in self.workers:
            done = Completion(op_id, mark)  # type: ignore[arg-type]
            worker.connection.send(Completions(worker.rank, worker.boot, (done,)))

    def store(self, keys: Sequence[bytes]) -> StoreBegun:
        begun = self.begin_store(keys)
        if begun.op_id:
            self.complete(begun.op_id)
            self.wait_for(lambda: begun.op_id in self.settled)
        return begun

    def use(self, keys: Sequence[bytes], hints: Hints | None = None) -> None:
        """A request that uses these keys begins, and ends at once."""
        self._last_request += 1
        self.scheduler.send(Admit(self._last_request, keys, (0, 0), hints))
        self.scheduler.send(End(self._last_request))

    def store_all(self, keys: Sequence[bytes], batch: int = 16) -> None:
        """Waits for slots where there are none yet."""
        for start in range(0, len(keys), batch):
            missing = list(keys[start : start + batch])

            def store_missing(missing: list[bytes] = missing) -> bool:
                begun = self.store(missing)
                missing[:] = [missing[index] for index in begun.unplaced]
                return not missing

            self.wait_for(store_missing)

    def store_until_found(self, keys: Sequence[bytes]) -> None:
        """Until all of them are there at once: while the pool grows, the last ones may take the slots of the first."""

        def store_missing() -> bool:
            self.store_all(keys)
            return self.lookup(keys, Hold.NOTHING).leading == len(keys)

        self.wait_for(store_missing)

    def lookup(self, keys: Sequence[bytes], hold: Hold = Hold.LEADING) -> Found:
        return self.ask(Lookup(keys, hold), Found)

    def release(self, lease_id: int) -> None:
        self.scheduler.send(Release((lease_id,)))

    def load(self, keys: Sequence[bytes]) -> int:
        """How many leading keys there were; all their bytes are verified on all ranks."""
        found = self.lookup(keys)
        if not found.lease_id:
            return 0
        begun = self.ask(BeginLoad(found.lease_id, 0, found.leading), LoadBegun)
        for key, slot in zip(keys, begun.slots, strict=False):
            for worker in self.workers:
                assert worker.read(slot) == content_of(key, worker.rank), f"wrong bytes in slot {slot}"
        self.complete(begun.op_id)
        self.wait_for(lambda: self.settled.get(begun.op_id) == "done")
        return found.leading

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


def main() -> None:
    path, count = Path(sys.argv[1]), int(sys.argv[2])
    engine = RawEngine(path, replace(HELLO, pid=os.getpid()))
    engine.store_all([key_of(number) for number in range(count)])
    engine.begin_store([key_of(10**6)])
    print("stored", flush=True)
    while True:
        engine.step()


if __name__ == "__main__":
    main()
