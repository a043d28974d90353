"""The workload and the measurements, which are the same for KVStow's control plane and vLLM's BlockPool.

It imports neither, so that it runs in the virtual environments of both.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Protocol

from bench.hashes import Hashes

CHAIN_BLOCKS = 1000
STORE_BLOCKS = 128
_LOOKUPS = 300
_STORES = 300
LONG_BLOCKS = 8192
_LONG_CALLS = 50
_USES = 2000
_SMALL_STORE = 16
_LENGTHS = (37, 128, 300, 999, CHAIN_BLOCKS, CHAIN_BLOCKS, CHAIN_BLOCKS)


class Subject(Protocol):
    """An index of blocks, with the keys that its caller holds."""

    def keys(self, hashes: list[bytes]) -> list[bytes]:
        """Return what the caller makes of the block hashes of a request, once for each request."""

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run of keys that are present."""

    def use(self, keys: Sequence[bytes]) -> int:
        """Do a `lookup`, keep the blocks from eviction, and give them back."""

    def store(self, keys: Sequence[bytes]) -> None:
        """Find room for new keys, make them visible, and leave them evictable."""

    def request(self, keys: Sequence[bytes]) -> int:
        """Make a whole request: look up and keep, store the rest, give back. Returns the length of the leading run that
        was found."""

    def end(self, keys: Sequence[bytes]) -> None:
        """End a request with these keys."""

    def own_operations(self) -> dict[str, Callable[[Sequence[bytes]], object]]:
        """Return operations on a long present prefix that only this subject has."""

    def curve_seconds(self, chains: Iterable[Sequence[bytes]]) -> float | None:
        """Return the seconds of CPU that the curve takes for a request. None if there is no curve."""

    def store_while_shrinking(self, keys: Sequence[bytes]) -> float | None:
        """Let the pool begin to shrink, then begin to store new keys. Returns the seconds of that. None if a pool
        cannot shrink."""

    def purge_slices(self) -> list[float] | None:
        """Remove everything. Returns the seconds of each slice, or None if there are no slices."""


def measure(make: Callable[[int], Subject], slots: int) -> dict[str, float]:
    """Measure a new subject in its own process. Returns medians of times in seconds, and bytes per slot.

    `_fresh` figures are of a pool that was just filled, chain by chain. For `_worn` figures it was filled once more
    with prefixes of all lengths, so that the blocks of a prefix lie in the places of blocks that were evicted.
    """
    hashes = Hashes(3 * slots)
    before = _resident_bytes()
    subject = make(slots)
    filling = fill(subject, hashes, slots)
    grown = _resident_bytes() - before
    gc.collect()
    gc.freeze()  # as vLLM does with long-lived objects
    found = {"store": median(filling), "bytes_per_slot": grown / slots}
    found |= _lookups(subject, hashes, range(0, slots, CHAIN_BLOCKS), "_fresh")
    found |= _long_prefixes(subject, hashes, slots - LONG_BLOCKS, "_fresh")
    stored, times = wear(subject, hashes, slots)
    found["store_evicting"] = median(times[-_STORES:])
    gc.collect()
    found["bytes_per_slot_worn"] = (_resident_bytes() - before) / slots
    found |= _lookups(subject, hashes, stored, "_worn")
    found |= _long_prefixes(subject, hashes, 2 * slots - LONG_BLOCKS, "_worn")
    again = _chains(subject, hashes, stored)
    new = (subject.keys(hashes.run(2 * slots + start, CHAIN_BLOCKS)) for start in range(0, slots // 2, CHAIN_BLOCKS))
    for name, chains in (("curve", again), ("curve_new", new)):
        seconds = subject.curve_seconds(chains)
        if seconds is not None:
            found[name] = seconds
    shrinking = subject.store_while_shrinking(subject.keys(hashes.run(3 * slots - _SMALL_STORE, _SMALL_STORE)))
    if shrinking is not None:
        found["store_shrinking"] = shrinking
    slices = subject.purge_slices()
    if slices:
        found["purge_slice_median"], found["purge_slice_max"] = median(slices), max(slices)
    return found


def replay(subject: Subject, requests: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Make all requests, given as block ids, one after the other. Keys are made before the clock starts."""
    keys = [subject.keys([block.to_bytes(32, "big") for block in request]) for request in requests]
    gc.collect()
    gc.freeze()
    started = time.perf_counter()
    hits = sum(map(subject.request, keys))
    return {"seconds": time.perf_counter() - started, "hits": hits, "blocks": sum(map(len, keys))}


def fill(subject: Subject, hashes: Hashes, slots: int) -> list[float]:
    """Store whole chains until every slot is used. Returns the seconds of each full-size store."""
    times = []
    for start in range(0, slots, CHAIN_BLOCKS):
        times += _store_prefix(subject, hashes.run(start, CHAIN_BLOCKS))
    return times


def wear(subject: Subject, hashes: Hashes, slots: int) -> tuple[list[int], list[float]]:
    """Store as many new blocks as there are slots, in prefixes of mixed lengths. Returns where the whole chains in
    their last half start, if they are still present, and the seconds of each full-size store."""
    choose = random.Random(2)
    at, times, chains = slots, [], []
    while at < 2 * slots:
        length = choose.choice(_LENGTHS)
        if at >= slots + slots // 2 and length == CHAIN_BLOCKS:
            chains.append(at)
        times += _store_prefix(subject, hashes.run(at, length))
        at += length
    kept = [start for start in chains if subject.lookup(subject.keys(hashes.run(start, CHAIN_BLOCKS))) == CHAIN_BLOCKS]
    return kept, times


def _store_prefix(subject: Subject, hashes: list[bytes]) -> list[float]:
    """Store a prefix piece by piece, as prefill computes it. Returns the seconds of each full-size store."""
    keys = subject.keys(hashes)
    pieces = [keys[start : start + STORE_BLOCKS] for start in range(0, len(keys), STORE_BLOCKS)]
    times = [_seconds(subject.store, piece) for piece in pieces]
    subject.end(keys)
    return [seconds for seconds, piece in zip(times, pieces, strict=True) if len(piece) == STORE_BLOCKS]


def _lookups(subject: Subject, hashes: Hashes, chains: Sequence[int], suffix: str) -> dict[str, float]:
    """Time lookups of many chains, a different one each time, so that no cache of the CPU has its part of the index.
    The figures with `_warm` repeat each lookup with new key objects."""
    choose = random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in ("lookup", "lookup_warm", "use", "use_warm", "keys")}
    for _ in range(_LOOKUPS):
        for name, call in (("lookup", subject.lookup), ("use", subject.use)):
            start = choose.choice(chains)
            for kind in (name, f"{name}_warm"):
                fresh = hashes.run(start, CHAIN_BLOCKS)
                times["keys"].append(_seconds(subject.keys, fresh))
                keys = subject.keys(fresh)
                times[kind].append(_seconds(call, keys))
                if call(keys) != CHAIN_BLOCKS:
                    raise RuntimeError(f"{name} did not find a chain that was stored")
    return {name + suffix: median(values) for name, values in times.items()}


def _chains(subject: Subject, hashes: Hashes, stored: Sequence[int]) -> Iterator[list[bytes]]:
    """Yield stored chains, each with new key objects."""
    choose = random.Random(3)
    for _ in range(_USES):
        yield subject.keys(hashes.run(choose.choice(stored), CHAIN_BLOCKS))


def _long_prefixes(subject: Subject, hashes: Hashes, start: int, suffix: str) -> dict[str, float]:
    """Time operations on a long prefix, again and again, with new key objects each time."""
    times: dict[str, list[float]] = {name: [] for name in subject.own_operations()}
    for _ in range(_LONG_CALLS):
        for name, call in subject.own_operations().items():
            times[name].append(_seconds(call, subject.keys(hashes.run(start, LONG_BLOCKS))))
    return {name + suffix: median(values) for name, values in times.items()}


def _seconds(call: Callable[[list[bytes]], object], keys: list[bytes]) -> float:
    started = time.perf_counter()
    call(keys)
    return time.perf_counter() - started


def _resident_bytes() -> int:
    """Return the resident memory without the allocator's reserve, which depends on the process's past (35 bytes a slot,
    or none)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
