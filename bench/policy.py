"""Orders of eviction on whole traces, and a pool's curve compared with pools of the curve's sizes.

Each pool is a real control plane, in the time of the trace. MIN knows the next use of every block. The figures of ARC
are those of KVStow's former implementation, on the same traces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import chain

from bench.policytraces import TRACES, Trace
from bench.report import Table, verdict
from kvstow.control.comparison import SIZES
from kvstow.control.shadows import Shadows, Tally, spread
from kvstow.keys import make_key
from kvstow_service.replay.hittable import TimedPool, foresight_hits

POOLS = {
    "conversation": (2000, 4000, 16_000),
    "synthetic": (1000, 2000, 8000),
    "shifts": (500, 4000),
    "stays": (500, 4000),
    "sessions": (500, 4000),
}
CURVES = {"conversation": 20_000, "synthetic": 20_000, "sessions": 20_000}
_ARC = {
    "conversation": {1000: 5.29, 2000: 7.19, 4000: 9.67, 8000: 19.19, 16_000: 27.05, 30_000: 31.09},
    "synthetic": {1000: 9.07, 2000: 14.91, 4000: 24.96, 8000: 39.00, 16_000: 55.73},
    "shifts": {500: 21.92, 1000: 28.11, 2000: 34.93, 4000: 40.92, 8000: 47.25, 16_000: 55.06},
    "stays": {500: 23.77, 1000: 30.55, 2000: 37.96, 4000: 45.42, 8000: 53.11, 16_000: 60.80},
    "sessions": {500: 11.90, 1000: 15.16, 2000: 21.01, 4000: 36.96, 8000: 58.66, 16_000: 77.62},
}
_MEAN_ERROR, _LARGEST_ERROR = 1.0, 3.0
"""The bars for the mean and the largest error of a curve, in points."""


def keys_of(trace: Trace) -> list[list[bytes]]:
    """Return keys as an engine makes them, which end with a hash."""
    key_of: dict[int, bytes] = {}
    for block in chain.from_iterable(trace.requests):
        if block not in key_of:
            key_of[block] = make_key(0, blake2b(block.to_bytes(8, "big"), digest_size=32).digest())
    return [[key_of[block] for block in request] for request in trace.requests]


def hits(trace: Trace, keys: Sequence[Sequence[bytes]], slots: int, policy: str) -> list[int]:
    """Return the hits of each request."""
    pool = TimedPool(slots, policy)
    return [pool.serve(each, now) for each, now in zip(keys, trace.times, strict=True)]


def run(names: Sequence[str], say: Callable[[str], None]) -> list[Table]:
    """Make a table for each trace."""
    return [_table(TRACES[name](), name, say) for name in names]


def _table(trace: Trace, name: str, say: Callable[[str], None]) -> Table:
    keys = keys_of(trace)
    blocks = sum(map(len, keys))
    rows = []
    for slots in POOLS[name]:
        began = time.perf_counter()
        auto, lru = (100 * sum(hits(trace, keys, slots, policy)) / blocks for policy in ("auto", "lru"))
        optimum = 100 * foresight_hits(trace.requests, slots) / blocks
        arc = _ARC.get(name, {}).get(slots)
        cells = [f"{share:.2f}" for share in (auto, lru)]
        cells += ["" if arc is None else f"{arc:.2f}", f"{optimum:.2f}"]
        rows.append([f"{slots:,}", *cells, f"{auto - lru:+.2f}"])
        say(f"{trace.name}, {slots:,} slots, {time.perf_counter() - began:.0f} s: {rows[-1]}")
    head = ["slots", "auto", "lru", "ARC", "MIN", "auto to lru"]
    return Table(f"{trace.name}: {len(keys):,} requests, % of {blocks:,} blocks that hit", head, rows)


def _follow(shadows: Shadows, keys: Sequence[Sequence[bytes]]) -> Tally:
    """Let the shadows follow the whole trace."""
    tally = Tally()
    for each in keys:
        (chain_keys,) = shadows.choose([shadows.part(each)])
        shadows.use(chain_keys, range(len(each)), tally)
    return tally


def run_curves(names: Sequence[str], say: Callable[[str], None]) -> list[Table]:
    """Compare the curves of one pool's shadows on whole traces with a replay at each size."""
    return [_curve(TRACES[name](), CURVES[name], say) for name in names]


def _leading_repeats(trace: Trace) -> int:
    """Return the hits of a pool that never evicts."""
    seen: set[int] = set()
    found = 0
    for request in trace.requests:
        found += next((at for at, block in enumerate(request) if block not in seen), len(request))
        seen.update(request)
    return found


def _curve(trace: Trace, slots: int, say: Callable[[str], None]) -> Table:
    keys = keys_of(trace)
    blocks = sum(map(len, keys))
    shadows = Shadows(SIZES, slots)
    tally = _follow(shadows, keys)
    found = spread(tally.hits, len(SIZES))
    rows, errors = [], list[float]()
    for times, predicted in zip(SIZES, 100 * found / tally.sampled, strict=True):
        size = round(times * slots)
        replayed = 100 * sum(hits(trace, keys, size, "lru")) / blocks
        errors.append(abs(predicted - replayed))
        rows.append([f"{size:,}", f"{predicted:.2f}", f"{replayed:.2f}", f"{predicted - replayed:+.2f}"])
        say(f"{trace.name}: {rows[-1]}")
    everything, repeated = 100 * tally.seen_hits / tally.seen_blocks, 100 * _leading_repeats(trace) / blocks
    errors.append(abs(everything - repeated))
    rows.append(["everything", f"{everything:.2f}", f"{repeated:.2f}", f"{everything - repeated:+.2f}"])
    mean, most = sum(errors) / len(errors), max(errors)
    bar = verdict(mean <= _MEAN_ERROR and most <= _LARGEST_ERROR)
    rows.append(["error", "", "", f"mean {mean:.2f}, largest {most:.2f}: {bar}"])
    head = ["slots", "predicted", "replayed", ""]
    title = (
        f"{trace.name}: % of blocks that hit, predicted by a pool of {slots:,} slots ({shadows.rate:.3f} of the keys)"
    )
    return Table(title, head, rows)
