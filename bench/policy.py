"""Orders of eviction on whole traces, and a pool's curve compared with pools of the curve's sizes.

Each pool is a real control plane, in the time of the trace. MIN knows the next use of every block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import chain
from unittest.mock import patch

from bench.policytraces import DATA, LIARS, TRACES, Trace, beside_liars
from bench.report import Table, verdict
from kvstow.control.curve import TIMES, Curve
from kvstow.keys import make_key
from kvstow_service.replay.hittable import Admitted, KeysById, TimedPool, foresight_hits
from kvstow_service.replay.trace import TraceRequest, events, read_trace

POOLS = {
    "conversation": (2000, 4000, 16_000),
    "synthetic": (2000, 4000, 8000, 16_000),
    "shifts": (500, 4000),
    "stays": (500, 4000),
    "sessions": (500, 4000),
    "phases": (2000,),
    "dying": (2000,),
}
LYING, LIARS_SLOTS = "liars", 1000
CASES = (*POOLS, LYING)
CURVES = (("conversation", 4000), ("synthetic", 4000), ("agents-120", 1000))
TRACE_FILES = {
    "conversation": "conversation_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "agents-120": "agents-120.runs.jsonl.gz",
}
_LARGEST_TIMES = 8
"""Of the sizes that are compared with real pools."""
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
    """Make a table for each of these `CASES`."""
    return [_liars(say) if name == LYING else _table(TRACES[name](), name, say) for name in names]


def _liars(say: Callable[[str], None]) -> Table:
    """Agents beside a client whose prompts end like tool calls, and come back otherwise than those."""
    honest = read_trace(str(DATA / TRACE_FILES["agents-120"]))
    blocks = sum(len(request.hash_ids) for request in honest)
    rows = []
    for kind, send in LIARS.items():
        requests, keys = beside_liars(honest, send), KeysById()
        shares = []
        for policy in ("auto", "lru"):
            found = zip(requests, _replay(requests, keys, TimedPool(LIARS_SLOTS, policy)), strict=True)
            shares.append(100 * sum(hits for request, hits in found if request.context is not None) / blocks)
        auto, lru = shares
        rows.append([kind, f"{auto:.2f}", f"{lru:.2f}", f"{auto - lru:+.2f}"])
        say(f"beside a liar: {rows[-1]}")
    title = f"agents-120 at {LIARS_SLOTS:,} slots, % of their {blocks:,} blocks that hit beside a client's"
    return Table(title, ["", "auto", "lru", "auto to lru"], rows)


def _table(trace: Trace, name: str, say: Callable[[str], None]) -> Table:
    keys = keys_of(trace)
    blocks = sum(map(len, keys))
    rows = []
    for slots in POOLS[name]:
        began = time.perf_counter()
        auto, lru = (100 * sum(hits(trace, keys, slots, policy)) / blocks for policy in ("auto", "lru"))
        optimum = 100 * foresight_hits(trace.requests, slots) / blocks
        cells = [f"{share:.2f}" for share in (auto, lru, optimum)]
        rows.append([f"{slots:,}", *cells, f"{auto - lru:+.2f}"])
        say(f"{trace.name}, {slots:,} slots, {time.perf_counter() - began:.0f} s: {rows[-1]}")
    head = ["slots", "auto", "lru", "MIN", "auto to lru"]
    return Table(f"{trace.name}: {len(keys):,} requests, % of {blocks:,} blocks that hit", head, rows)


def run_curves(cases: Sequence[tuple[str, int]], say: Callable[[str], None]) -> list[Table]:
    """Compare the curve of one pool at the end of a trace with real pools of its sizes, over the same requests, which
    overlap as in the trace."""
    return [_curve(name, slots, say) for name, slots in cases]


def _replay(requests: Sequence[TraceRequest], keys: KeysById, pool: TimedPool) -> list[int]:
    """Return the hits of each request."""
    running: dict[int, Admitted] = {}
    found = []
    for event in events(requests):
        request, at = requests[event.number], event.at / 1000
        pool.tick(at)
        if event.is_end:
            pool.end(running.pop(event.number), at, request.stop)
        else:
            running[event.number] = pool.admit(keys.keys_of(request.hash_ids), at, request.looked_up)
            found.append(running[event.number].found)
    pool.engine.tick()
    return found


def _curve(name: str, slots: int, say: Callable[[str], None]) -> Table:
    requests, keys = read_trace(str(DATA / TRACE_FILES[name])), KeysById()
    pool = TimedPool(slots, "auto", curve=True)
    followed = pool.engine.pool.requests.curve
    assert followed is not None
    spent = 0.0

    def follow(num_slots: int, *, is_lru: bool) -> None:
        nonlocal spent
        began = time.thread_time()
        Curve.follow(followed, num_slots, is_lru=is_lru)
        spent += time.thread_time() - began

    with patch.object(followed, "follow", follow):
        own = _replay(requests, keys, pool)
    curve, evidence = pool.engine.curve(), pool.engine.curve_evidence()
    if curve is None or evidence is None:
        return Table(f"{name}, {slots:,} slots: too early to tell", ["slots"], [])
    first = len(requests) - evidence.requests
    window = slice(first, first + curve.requests)
    blocks = sum(len(request.hash_ids) for request in requests[window])
    rows, errors = [], list[float]()
    for times, point in zip(TIMES, curve.points, strict=True):
        if times > _LARGEST_TIMES:
            break
        hits = own if times == 1 else _replay(requests, keys, TimedPool(point.num_slots, "auto"))
        real, predicted = 100 * sum(hits[window]) / blocks, 100 * point.ratio
        errors.append(abs(predicted - real))
        bound = ">= " if point.at_least else ""
        rows.append(
            [f"{point.num_slots:,}", f"{bound}{predicted:.2f}", f"{100 * point.error:.2f}", f"{real:.2f}",
             f"{predicted - real:+.2f}"]
        )  # fmt: skip
        say(f"{name}: {rows[-1]}")
    mean, most = sum(errors) / len(errors), max(errors)
    bar = verdict(mean <= _MEAN_ERROR and most <= _LARGEST_ERROR)
    rows.append(["error", "", "", "", f"mean {mean:.2f}, largest {most:.2f}: {bar}"])
    title = (
        f"{name}: % of blocks that hit in the last {curve.requests:,} requests, predicted by one of {slots:,} slots; "
        f"the curve took {1000 * spent / len(requests):.1f} ms of CPU a request"
    )
    return Table(title, ["slots", "predicted", "error bar", "real pool", ""], rows)
