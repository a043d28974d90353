"""One client of `bench.attachhost`: prints its figures as JSON in its last line.

`python -m bench.attachclient PATH SLOTS latency` measures calls one by one; `rate SECONDS` waits for a line on standard
input and then looks up without a pause.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import time
from pathlib import Path

from bench.attachhost import CALLS, chains, timed
from bench.subject import CHAIN_BLOCKS
from kvstow.attach.calls import Found, Hold, Lookup, Release
from kvstow.attach.connection import AttachConnection
from kvstow.attach.extentcalls import Detach
from kvstow.attach.hello import Hello
from kvstow.attach.identity import NamespaceIdentity, PoolIdentity

_PATIENCE_SECONDS = 10.0
_PREFIXES = 50


def attached(path: Path) -> AttachConnection:
    hello = Hello(
        role="scheduler",
        engine="bench",
        host="localhost",
        pid=os.getpid(),
        pool=PoolIdentity((2 << 20,), (), "bfloat16", ()),
        namespace=NamespaceIdentity("bench", "", "configured", ""),
    )
    connection = AttachConnection(path, lambda: hello)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while connection.state != "attached":
        connection.poll(0.1)
        if time.monotonic() > deadline:
            raise TimeoutError(connection.problem)
    return connection


class Caller:
    """Look-ups over the wire."""

    def __init__(self, connection: AttachConnection) -> None:
        self._connection = connection

    def lookup(self, keys: list[bytes]) -> None:
        self._found(keys, Hold.NOTHING)

    def use(self, keys: list[bytes]) -> None:
        self._connection.tell(Release((self._found(keys, Hold.LEADING).lease_id,)))

    def send_and_take(self, keys: list[bytes]) -> tuple[float, float]:
        """Seconds of this thread for the request, and for an answer that is there already. Of CPU time: on few cores
        the service, which the request wakes up, runs before this thread goes on."""
        connection = self._connection
        begun = time.thread_time()
        call = connection.call(Lookup(keys, Hold.NOTHING))
        sent = time.thread_time() - begun
        select.select([connection], [], [], _PATIENCE_SECONDS)
        begun = time.thread_time()
        connection.poll()
        self._check(call.answer(Found))
        return sent, time.thread_time() - begun

    def _found(self, keys: list[bytes], hold: Hold) -> Found:
        call = self._connection.call(Lookup(keys, hold))
        self._connection.wait(call, _PATIENCE_SECONDS)
        return self._check(call.answer(Found))

    @staticmethod
    def _check(found: Found) -> Found:
        if found.leading != CHAIN_BLOCKS:
            raise ValueError(f"{found.leading} of {CHAIN_BLOCKS} blocks were found")
        return found


def main(path: str, slots: int, mode: str, seconds: float = 0.0) -> None:
    connection = attached(Path(path))
    chain = chains(slots, json.loads(Path(f"{path}.json").read_text()))
    caller = Caller(connection)
    gc.collect()
    gc.freeze()
    if mode == "latency":
        pairs = [caller.send_and_take(chain(number)) for number in range(CALLS)]
        figures = {
            "lookup": timed(caller.lookup, chain, CALLS),
            "use": timed(caller.use, chain, CALLS),
            "send": [sent for sent, _ in pairs],
            "take": [taken for _, taken in pairs],
            "idle": timed(lambda _: connection.poll(), lambda _: [], CALLS),
        }
    else:
        figures = {"lookup": looked_up(caller, [chain(number) for number in range(_PREFIXES)], seconds)}
    connection.tell(Detach())
    connection.close()
    print(json.dumps(figures), flush=True)


def looked_up(caller: Caller, prefixes: list[list[bytes]], seconds: float) -> list[float]:
    print("ready", flush=True)
    sys.stdin.readline()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        caller.lookup(prefixes[len(found) % len(prefixes)])
        found.append(time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:]))
