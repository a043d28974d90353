"""Lookups of one engine, with and without another engine that sends the slowest calls of the node service.

`python -m bench.liar PATH SLOTS` attaches to a service that `bench.attachclient` has filled, and prints the seconds of
each lookup as JSON. The other engine is a process that is stopped and continued by turns, so that both series come from
the same minutes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from bench.attachbaseline import chains
from bench.attachclient import AttachedSubject
from bench.program import running
from kvstow.attach.calls import Hold
from kvstow.attach.wire import MOST_ITEMS, MOST_STORED
from kvstow.messages import Completion

_TURNS, _LOOKUPS, _SETTLES_SECONDS = 20, 50, 0.3
_CHAINS, _ASKED_AT_ONCE, _STORES_AT_ONCE = 65, 2, 64
_BOOT = "bench"


def lie(subject: AttachedSubject, keys: list[bytes]) -> None:
    """Without an end, lease, load, use and release as many blocks as one call may have, and store as fast as the
    service answers."""
    engine = subject.engine
    for number in count():
        found = [engine.find(keys, hold=Hold.PRESENT, count=False) for _ in range(_ASKED_AT_ONCE)]
        engine.end_request(engine.admit(keys))
        names = (f"{number} {index}".encode().ljust(34) for index in count())
        stores = [
            engine.begin_store(list(islice(names, MOST_STORED)), range(MOST_STORED)) for _ in range(_STORES_AT_ONCE)
        ]
        engine.wait(*found, seconds=60.0)
        engine.wait(*stores, seconds=60.0)
        loads = [
            engine.begin_load(answer.value.lease, range(answer.value.lease.num_keys))
            for answer in found[1:]
            if answer.value.lease.num_keys
        ]
        engine.release_lease(found[0].value.lease)
        engine.wait(*loads, seconds=60.0)
        ops = [answer.value for answer in loads] + [answer.value.op for answer in stores]
        engine.complete(0, _BOOT, [Completion(op.op_id, "done") for op in ops if op is not None])
        engine.step()
        engine.take_settled()
        if not number:
            print("ready", flush=True)


def measure(path: str, slots: int) -> dict[str, list[float]]:
    subject = AttachedSubject(Path(path))
    subject.wait_for_slots(1)
    chain = chains(slots, json.loads(Path(f"{path}.json").read_text()))
    keys = chain(0)
    subject.find_soon(keys)
    lease = subject.engine.find(keys, hold=Hold.LEADING)  # so that stores of the other engine evict none of these
    subject.engine.wait(lease, seconds=60.0)
    times: dict[str, list[float]] = {"without": [], "with": []}
    with running("bench.liar", path, str(slots), "lie") as liar:
        assert liar.stdout is not None
        liar.stdout.readline()
        for turn in range(2 * _TURNS):
            is_stopped = turn % 2 == 0
            liar.send_signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)
            time.sleep(_SETTLES_SECONDS)
            times["without" if is_stopped else "with"] += _lookups(subject, keys)
        liar.kill()
    subject.close()
    return times


def _lookups(subject: AttachedSubject, keys: list[bytes]) -> Iterator[float]:
    for _ in range(_LOOKUPS):
        begun = time.perf_counter()
        if subject.lookup(keys) != len(keys):
            raise ValueError("a leased prefix is not found")
        yield time.perf_counter() - begun


def main(path: str, slots: int, mode: str = "") -> None:
    if not mode:
        print(json.dumps(measure(path, slots)), flush=True)
        return
    subject = AttachedSubject(Path(path))
    subject.wait_for_slots(1)
    chain = chains(slots, json.loads(Path(f"{path}.json").read_text()))
    lie(subject, [key for number in range(_CHAINS) for key in chain(number)][:MOST_ITEMS])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
