"""What is measured on either side, and how: one workload for KVStow's control plane and vLLM's BlockPool.

Imports neither, so that it runs in the virtual environments of both.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

from bench.hashes import Hashes

CHAIN_BLOCKS = 1000
STORE_BLOCKS = 128
_LOOKUPS = 300
_STORES = 300


class Subject(Protocol):
    """An index of blocks, with the keys as its caller holds them."""

    def keys(self, hashes: list[bytes]) -> list[bytes]:
        """What the caller makes of the block hashes of a request, once."""

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run that is present."""

    def use(self, keys: Sequence[bytes]) -> int:
        """`lookup`, keep the blocks from eviction, give them back."""

    def store(self, keys: Sequence[bytes]) -> None:
        """Take room for new keys, make them visible, leave them evictable."""

    def request(self, keys: Sequence[bytes]) -> int:
        """All of a request: look up and keep, store the rest, give back. Returns the leading run found."""

    def purge_slices(self) -> list[float] | None:
        """Remove everything; seconds of each slice. None where there are no slices."""


def measure(make: Callable[[int], Subject], slots: int) -> dict[str, float]:
    """Times in seconds (medians) and bytes a slot. Fills a new subject; needs a process of its own for the memory."""
    hashes = Hashes(slots + _STORES * STORE_BLOCKS)
    before = _resident_bytes()
    subject = make(slots)
    filling = _fill(subject, hashes, slots)
    grown = _resident_bytes() - before
    gc.collect()
    gc.freeze()  # as vLLM does with what lives for long
    found = {"store": median(filling), "bytes_per_slot": grown / slots}
    found |= _lookups(subject, hashes, slots // CHAIN_BLOCKS)
    new = [subject.keys(hashes.run(slots + n * STORE_BLOCKS, STORE_BLOCKS)) for n in range(_STORES)]
    found["store_evicting"] = median(_seconds(subject.store, keys) for keys in new)
    slices = subject.purge_slices()
    if slices:
        found["purge_slice_median"], found["purge_slice_max"] = median(slices), max(slices)
    return found


def replay(subject: Subject, requests: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Every request (its block ids), one after the other; keys are made before the clock starts."""
    keys = [subject.keys([block.to_bytes(32, "big") for block in request]) for request in requests]
    gc.collect()
    gc.freeze()
    started = time.perf_counter()
    hits = sum(map(subject.request, keys))
    return {"seconds": time.perf_counter() - started, "hits": hits, "blocks": sum(map(len, keys))}


def _fill(subject: Subject, hashes: Hashes, slots: int) -> list[float]:
    """Store whole chains until every slot is used; seconds of each full-size store."""
    times = []
    for chain in range(0, slots, CHAIN_BLOCKS):
        keys = subject.keys(hashes.run(chain, CHAIN_BLOCKS))
        for start in range(0, CHAIN_BLOCKS, STORE_BLOCKS):
            piece = keys[start : start + STORE_BLOCKS]
            seconds = _seconds(subject.store, piece)
            if len(piece) == STORE_BLOCKS:
                times.append(seconds)
    return times


def _lookups(subject: Subject, hashes: Hashes, chains: int) -> dict[str, float]:
    """Each time another chain, out of all of the pool's: its part of the index is in no cache of the CPU. The same
    again, with the key objects made anew, is `warm`."""
    choose = random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in ("lookup", "lookup_warm", "use", "use_warm", "keys")}
    for _ in range(_LOOKUPS):
        for name, call in (("lookup", subject.lookup), ("use", subject.use)):
            start = choose.randrange(chains) * CHAIN_BLOCKS
            for kind in (name, f"{name}_warm"):
                fresh = hashes.run(start, CHAIN_BLOCKS)
                times["keys"].append(_seconds(subject.keys, fresh))
                keys = subject.keys(fresh)
                times[kind].append(_seconds(call, keys))
                if call(keys) != CHAIN_BLOCKS:
                    raise RuntimeError(f"{name} did not find a chain that was stored")
    return {name: median(values) for name, values in times.items()}


def _seconds(call: Callable[[list[bytes]], object], keys: list[bytes]) -> float:
    started = time.perf_counter()
    call(keys)
    return time.perf_counter() - started


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
