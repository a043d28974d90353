"""The baseline for calls of attached engines: the same calls in process.

`python -m bench.attachbaseline SLOTS POOL` prints times as JSON. POOL is `fresh` or `worn`, as in `bench.subject`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from random import Random

from bench.hashes import Hashes
from bench.kvstow_subject import EngineSubject
from bench.subject import CHAIN_BLOCKS, Subject, fill, wear
from kvstow.keys import make_key

CALLS = 2000


def chains(slots: int, starts: Sequence[int]) -> Callable[[int], list[bytes]]:
    """Return a function that returns the keys of a prefix, a different one each time, as new objects."""
    hashes, choose = Hashes(3 * slots), Random(1)

    def chain(number: int) -> list[bytes]:
        return [make_key(0, block_hash) for block_hash in hashes.run(choose.choice(starts), CHAIN_BLOCKS)]

    return chain


def fill_pool(subject: Subject, slots: int, *, worn: bool) -> list[int]:
    """Fill a pool. Returns the numbers of the first blocks of the prefixes in it."""
    hashes = Hashes(3 * slots)
    fill(subject, hashes, slots)
    return wear(subject, hashes, slots)[0] if worn else list(range(0, slots, CHAIN_BLOCKS))


def timed(call: Callable[[list[bytes]], object], chain: Callable[[int], list[bytes]], calls: int) -> list[float]:
    """Return the seconds of each call."""
    seconds = []
    for number in range(calls):
        keys = chain(number)
        begun = time.perf_counter()
        call(keys)
        seconds.append(time.perf_counter() - begun)
    return seconds


def main(slots: int, *, worn: bool) -> None:
    subject = EngineSubject(slots)
    chain = chains(slots, fill_pool(subject, slots, worn=worn))
    gc.collect()
    gc.freeze()
    find_runs = subject.engine.find_runs  # the lookup of attached engines
    print(json.dumps({"lookup": timed(find_runs, chain, CALLS), "use": timed(subject.use, chain, CALLS)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), worn=sys.argv[2] == "worn")
