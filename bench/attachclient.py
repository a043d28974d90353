"""One attached engine with a rank that moves no bytes. The last line that it prints has its figures as JSON.

`python -m bench.attachclient PATH SLOTS MODE`. PATH.json says where the prefixes in the pool begin. The modes:

    fill, wear          fill the pool, and write PATH.json; print the seconds that it took
    latency             measure calls one by one
    rate SECONDS        wait for a line on standard input, then look up without a pause
    found               print when a whole prefix is found (in seconds of the monotonic clock)
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.attachbaseline import CALLS, chains, fill_pool, timed
from bench.subject import CHAIN_BLOCKS
from kvstow.attach.calls import (
    Detach,
    ExtentGrant,
    ExtentSlots,
    GrantedExtents,
    Hold,
    PopulatedExtents,
    RegisteredExtents,
    ReleasedExtents,
    Report,
    RevokedExtents,
    listed,
)
from kvstow.attach.channel import close_fds
from kvstow.attach.connection import AttachConnection
from kvstow.attach.engine import AttachedEngine, Hits
from kvstow.attach.hello import Hello
from kvstow.attach.identity import NamespaceIdentity, PoolIdentity
from kvstow.attach.wire import Kind
from kvstow.keys import make_key
from kvstow.messages import Completion, RankReport

SLOT_BYTES = 512
_PATIENCE_SECONDS = 60.0
_PREFIXES = 50
_BOOT = "bench"


class BareRank:
    """The worker of a rank that has memory, and never touches it."""

    def __init__(self, path: Path, token: str) -> None:
        hello = Hello(role="worker", engine="bench", host="localhost", pid=os.getpid(), token=token)
        self._connection = AttachConnection(path, lambda: hello, accepts_fds=True)
        self._grants: dict[int, ExtentGrant] = {}
        self._populated: dict[int, int] = {}
        self._registered: dict[int, int] = {}
        self._has_reported = False

    @property
    def slots(self) -> int:
        return sum(self._registered.values())

    def poll(self) -> None:
        for frame in self._connection.poll():
            close_fds(frame.fds)
            if frame.kind == Kind.EXTENTS:
                for grant in GrantedExtents.unpack(frame.payload).extents:
                    self._grants[grant.extent_id] = grant
                    self._populated[grant.extent_id] = grant.populated_bytes
            elif frame.kind == Kind.POPULATED:
                self._populated |= dict(PopulatedExtents.unpack(frame.payload).extents)
            elif frame.kind == Kind.REVOKED:
                self._let_go(RevokedExtents.unpack(frame.payload).extent_ids)
        if self._connection.state == "attached":
            self._report()
            self._register()

    def close(self) -> None:
        self._connection.send(Detach())
        self._connection.close()

    def _report(self) -> None:
        if not self._has_reported:
            report = RankReport.without_pool(0, _BOOT, "ready", SLOT_BYTES)
            self._connection.call(Report(replace(report, sender=_BOOT, number=1)))
            self._has_reported = True

    def _register(self) -> None:
        news = []
        for extent_id, grant in self._grants.items():
            slots = min(grant.num_slots, self._populated[extent_id] // SLOT_BYTES)
            if slots > self._registered.get(extent_id, 0):
                self._registered[extent_id] = slots
                news.append(ExtentSlots(extent_id, slots))
        for piece in listed(news):
            self._connection.send(RegisteredExtents(piece))

    def _let_go(self, extent_ids: Sequence[int]) -> None:
        for extent_id in extent_ids:
            for known in (self._grants, self._populated, self._registered):
                known.pop(extent_id, None)
        self._connection.send(ReleasedExtents(tuple(extent_ids)))


class AttachedSubject:
    """An engine in the node service as a `bench.subject.Subject`."""

    def __init__(self, path: Path) -> None:
        self.engine = AttachedEngine(
            path,
            engine="bench",
            pool=PoolIdentity((SLOT_BYTES,), (), "uint8", ()),
            namespace=NamespaceIdentity("bench", "", "configured", ""),
        )
        self._until(lambda: self.engine.is_attached)
        assert self.engine.ticket is not None
        self._rank = BareRank(path, self.engine.ticket.token)

    def wait_for_slots(self, slots: int) -> None:
        """Wait until the service lets this engine use this many slots. The engine learns of them later than the
        rank."""
        self._until(lambda: self._rank.slots >= slots and self._room() >= slots)

    def close(self) -> None:
        self._rank.close()
        self.engine.close()

    def keys(self, hashes: list[bytes]) -> list[bytes]:
        return [make_key(0, block_hash) for block_hash in hashes]

    def lookup(self, keys: Sequence[bytes]) -> int:
        return self._find(keys, Hold.NOTHING).leading

    def use(self, keys: Sequence[bytes]) -> int:
        hits = self._find(keys, Hold.LEADING)
        self.engine.release_lease(hits.lease)
        return hits.leading

    def store(self, keys: Sequence[bytes]) -> None:
        engine = self.engine
        answer = engine.begin_store(keys, range(len(keys)))
        engine.wait(answer, seconds=_PATIENCE_SECONDS)
        op = answer.value.op
        if op is not None:
            engine.complete(0, _BOOT, [Completion(op.op_id, "done", None, len(op.slots) * SLOT_BYTES, 0.001)])
            self._until(lambda: any(settled.mark == "done" for settled in engine.take_settled()))

    def find_soon(self, keys: Sequence[bytes]) -> None:
        """Wait until all keys are found."""
        self._until(lambda: self.lookup(keys) == len(keys))

    def send_and_take(self, keys: list[bytes]) -> tuple[float, float]:
        """Return this thread's seconds for the request, and for taking an answer that has arrived. They are CPU time:
        if there are few cores, the request wakes the service, which then runs before this thread continues."""
        begun = time.thread_time()
        answer = self.engine.find(keys, hold=Hold.NOTHING)
        sent = time.thread_time() - begun
        select.select([self.engine], [], [], _PATIENCE_SECONDS)
        begun = time.thread_time()
        self.engine.step()
        if answer.value.leading != len(keys):
            raise ValueError(f"{answer.value.leading} of {len(keys)} blocks were found")
        return sent, time.thread_time() - begun

    def _room(self) -> int:
        self.engine.wait(self.engine.begin_store((), ()), seconds=_PATIENCE_SECONDS)
        return self.engine.store_room()

    def _find(self, keys: Sequence[bytes], hold: Hold) -> Hits:
        answer = self.engine.find(keys, hold=hold)
        self.engine.wait(answer, seconds=_PATIENCE_SECONDS)
        return answer.value

    def _until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        rank: BareRank | None = getattr(self, "_rank", None)
        while not condition():
            self.engine.step()
            if rank is not None:
                rank.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(self.engine.problem)

    # Methods of a subject that are not measured here.

    request = use

    def end(self, keys: Sequence[bytes]) -> None:
        self.engine.end_request(self.engine.admit(keys))

    def own_operations(self) -> dict[str, Callable[[Sequence[bytes]], object]]:
        return {}

    def store_while_shrinking(self, keys: Sequence[bytes]) -> None: ...

    def curve_seconds(self, chains: Iterable[Sequence[bytes]]) -> None: ...

    def purge_slices(self) -> None: ...


def main(path: str, slots: int, mode: str, seconds: float = 0.0) -> None:
    subject = AttachedSubject(Path(path))
    subject.wait_for_slots(slots)
    index = Path(f"{path}.json")
    if mode in ("fill", "wear"):
        begun = time.monotonic()
        index.write_text(json.dumps(fill_pool(subject, slots, worn=mode == "wear")))
        figures: Any = time.monotonic() - begun
    else:
        figures = _measure(subject, chains(slots, json.loads(index.read_text())), mode, seconds)
    subject.close()
    print(json.dumps(figures), flush=True)


def _measure(subject: AttachedSubject, chain: Callable[[int], list[bytes]], mode: str, seconds: float) -> Any:
    subject.find_soon(chain(0))
    if mode == "found":
        return time.monotonic()
    gc.collect()
    gc.freeze()
    if mode == "rate":
        return {"lookup": looked_up(subject, [chain(number) for number in range(_PREFIXES)], seconds)}
    pairs = [subject.send_and_take(chain(number)) for number in range(CALLS)]
    return {
        "lookup": timed(subject.lookup, chain, CALLS),
        "use": timed(subject.use, chain, CALLS),
        "send": [sent for sent, _ in pairs],
        "take": [taken for _, taken in pairs],
        "idle": timed(lambda _: subject.engine.step(), lambda _: [], CALLS),
    }


def looked_up(subject: AttachedSubject, prefixes: list[list[bytes]], seconds: float) -> list[float]:
    print("ready", flush=True)
    sys.stdin.readline()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        if subject.lookup(prefixes[len(found) % len(prefixes)]) != CHAIN_BLOCKS:
            raise ValueError("a prefix that was found before is not found")
        found.append(time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:]))
