"""The longest time for which a call of the control plane holds the pool's lock, in several states of a full-size pool.

`python -m bench holds` records these times, with lookups beside a client that sends the slowest calls (`bench.liar`).
`python -m bench.holds [SLOTS]` prints them as JSON, and a line for each state on standard error: the longest hold, the
99.9th percentile, and the longest garbage collection, which no hold includes. Times are CPU time of the thread, so
other programs do not matter. They include single C calls, such as the growth of a table.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bench.attach import run_liar
from bench.hashes import Hashes
from bench.kvstow_subject import EngineSubject
from bench.program import answer_of, running
from bench.report import Table, verdict
from bench.subject import STORE_BLOCKS
from kvstow.hints import Hints, context_id

_CHAIN = 8192
_TURNS = 400


class TimedLock:
    """Wraps a lock, and notes for how many seconds of CPU time it was held."""

    def __init__(self, lock: object) -> None:
        self._lock = lock
        self._began = self._collecting = 0.0
        self.held: list[float] = []
        self.collected: list[float] = []
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: object) -> None:
        now = time.thread_time()
        if phase == "start":
            self._collecting = now
        else:
            self.collected.append(now - self._collecting)
            self._began += self.collected[-1]

    def __enter__(self) -> None:
        self._lock.__enter__()  # type: ignore[attr-defined]
        self._began = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.held.append(time.thread_time() - self._began)
        self._lock.__exit__(*error)  # type: ignore[attr-defined]


class Holds:
    """The holds of the lock, by the state of the pool."""

    def __init__(self, subject: EngineSubject) -> None:
        self.lock = TimedLock(subject.engine.pool.lock)
        subject.engine.pool.lock = self.lock  # type: ignore[assignment]
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        self.lock.held.clear()
        self.lock.collected.clear()
        yield
        held = sorted(self.lock.held)
        self.found[name] = {"longest": held[-1], "p99.9": held[int(len(held) * 0.999) - 1], "holds": len(held)}
        self.found[name]["collection"] = max(self.lock.collected, default=0.0)


SLOTS = 1_000_000
_BAR = 2e-3


def run(say: Callable[[str], None]) -> list[Table]:
    say(f"holds, {SLOTS:,} slots")
    with running("bench.holds", str(SLOTS)) as process:
        found: dict[str, dict[str, float]] = answer_of(process)
    rows = [
        [state, *(f"{1e3 * figures[name]:.2f} ms" for name in ("longest", "p99.9", "collection")), _verdict(figures)]
        for state, figures in found.items()
    ]
    head = ["state of the pool", "longest", "99.9 %", "longest collection", "bar"]
    return [Table(f"Holds of the lock, {SLOTS:,} slots, CPU time", head, rows), run_liar(say)]


def _verdict(figures: dict[str, float]) -> str:
    return f"{1e3 * _BAR:g} ms: {verdict(figures['longest'] <= _BAR)}"


def measure(slots: int) -> dict[str, dict[str, float]]:
    subject, hashes = EngineSubject(slots), Hashes(4 * slots)
    engine = subject.engine
    gc.collect()
    gc.freeze()
    holds = Holds(subject)

    def store(start: int, end: int) -> None:
        for at in range(start, end, STORE_BLOCKS):
            subject.store(subject.keys(hashes.run(at, min(STORE_BLOCKS, end - at))))

    with holds.state("filling an empty pool"):
        store(0, slots)
    with holds.state("full: every store evicts"):
        store(slots, 2 * slots)
    at = 2 * slots
    starts = range(slots, 2 * slots - _CHAIN, _CHAIN)
    chains = [tuple(subject.keys(hashes.run(start, _CHAIN))) for start in starts]  # the collector skips them
    gc.collect()
    with holds.state("all blocks leased, then released"):
        leases = [engine.acquire(keys[first : first + 1024]) for keys in chains for first in range(0, _CHAIN, 1024)]
        for lease in leases:
            engine.release_lease(lease)
    for turn in range(3):
        for number, keys in enumerate(chains):
            hints = Hints(context_id(f"{turn} {number}"), resume_in=3600.0 + number)
            engine.end_request(engine.admit(keys, hints=hints))
    with holds.state("all blocks used three times: stores of 16"):
        for _ in range(_TURNS):
            subject.store(subject.keys(hashes.run(at, 16)))
            at += 16
    with holds.state("purge of all"):
        engine.admin.purge(everything=True).run()
    with holds.state("filling it again"):
        store(at, at + slots // 2)
    return holds.found


def main(arguments: Sequence[str]) -> None:
    slots = int(arguments[0]) if arguments else SLOTS
    found = measure(slots)
    for name, figures in found.items():
        longest, usual = 1e3 * figures["longest"], 1e3 * figures["p99.9"]
        collection = 1e3 * figures["collection"]
        words = f"{longest:.2f} ms, p99.9 {usual:.2f} ms of {figures['holds']:,}; collector {collection:.2f} ms"
        print(f"{name}: {words}", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
