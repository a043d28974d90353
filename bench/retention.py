"""Hints on whole traces: hits with hints that are right, wrong or hostile, or only names, compared with the pool
without hints and with MIN, which knows the next use of every block.

Each pool is a real control plane, in the time of the trace. The traces are generated ones of agents, and the public one
of conversations, in which a request belongs to the conversation whose chain it continues.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import exp, inf, log
from pathlib import Path
from typing import Any, NamedTuple

from bench.policytraces import Trace, read
from bench.report import Table, verdict
from kvstow.hints import Hints, context_id
from kvstow.keys import make_key
from kvstow_service.replay.hittable import TimedPool, foresight_hits

CONVERSATION_SLOTS = 4000
NAMES = 1_000_000
_EXACT, _NOISY, _WORSE = 0.95, 0.9, 0.5
"""The bars: shares of MIN's hits, and points by which hits may fall below those of the pool without hints."""


class Request(NamedTuple):
    """A request. `context` is None if the client gives no hints. `gap` is the time until the next request of the
    context, or `inf` if there is none."""

    time: float
    blocks: list[int]
    context: int | None
    gap: float = inf


Say = Callable[[int, Request], Hints | None]
"""Returns the hints of the request with this number."""


# -- traces ------------------------------------------------------------------------------------------------------------


class _Branch(NamedTuple):
    """An agent's branch before its next turn. Branches are ordered by their first fields."""

    time: float
    context: int
    chain: list[int]
    turns: int
    is_fork: bool


def agents(count: int = 32, seconds: float = 2400.0, *, others: bool) -> list[Request]:
    """Generate agents that take 43 turns at the median, with heavy-tailed gaps between them. Some turns start
    subagents, which end. With `others`, there are also a fifth as many requests that are never repeated."""
    choose = random.Random(5)
    fresh = iter(range(1, 1 << 40))
    prompts = [[next(fresh) for _ in range(20)] for _ in range(4)]
    contexts = iter(range(1 << 40))

    def begin(now: float) -> _Branch:
        chain = [*choose.choice(prompts), *(next(fresh) for _ in range(10))]
        return _Branch(now, next(contexts), chain, max(3, int(choose.lognormvariate(log(43), 0.5))), False)

    branches = [begin(300 * choose.random()) for _ in range(count)]
    heapify(branches)
    found: list[Request] = []
    while branches and branches[0].time < seconds:
        now, context, chain, turns, is_fork = heappop(branches)
        chain = [*chain, *(next(fresh) for _ in range(max(1, round(11.5 * choose.random()))))]
        found.append(Request(now, chain, context))
        gap = 3 + min(choose.lognormvariate(log(8), 1.5), 1200)
        if turns > 1 and not is_fork and choose.random() < 0.08:
            for _ in range(choose.randint(1, 3)):
                heappush(branches, _Branch(now + 1, next(contexts), chain, choose.randint(2, 8), True))
            gap += 60
        if turns > 1:
            heappush(branches, _Branch(now + gap, context, chain, turns - 1, is_fork))
        elif not is_fork:
            heappush(branches, begin(now + gap))
    if others:
        times = [seconds * choose.random() for _ in range(len(found) // 5)]
        found += [Request(now, [next(fresh) for _ in range(60)], None) for now in times]
    return with_gaps(sorted(found, key=lambda request: request.time))


def flooded(requests: Sequence[Request], names: int = NAMES) -> Iterator[Request]:
    """Yield these requests beside `names` requests of a client for which another name costs hardly anything. It has 8
    prompts of one block, and most of its requests are shorter than a block."""
    prompts = [[(1 << 41) + prompt] if prompt < 8 else [] for prompt in range(64)]
    each, sent = names / len(requests), 0.0
    before = requests[0].time
    for number, request in enumerate(requests):
        count = int(sent + each) - int(sent)
        sent += each
        for flood in range(count):
            now = before + (request.time - before) * flood / count
            yield Request(now, prompts[(number + flood) % len(prompts)], None)
        before = request.time
        yield request


def conversations(trace: Trace) -> list[Request]:
    """Return the requests of a trace, each in the conversation whose last chain it continues. Their last blocks, which
    are not full, are left out, because no engine keeps those."""
    context_of: dict[int, int] = {}
    found = []
    for number, (now, blocks) in enumerate(zip(trace.times, trace.requests, strict=True)):
        full = blocks[:-1]
        context = next((context_of.pop(block) for block in reversed(full[1:]) if block in context_of), number)
        if len(full) > 1:  # a single block tells nothing, because all conversations begin with the same one
            context_of[full[-1]] = context
        found.append(Request(now, full, context))
    return with_gaps(found)


def with_gaps(requests: Iterable[Request]) -> list[Request]:
    following: dict[int, float] = {}
    found = []
    for request in reversed(list(requests)):
        if (context := request.context) is not None:
            request = request._replace(gap=following.get(context, inf) - request.time)
            following[context] = request.time
        found.append(request)
    return found[::-1]


def working_set(requests: Sequence[Request]) -> int:
    """Return the largest number of blocks at one time that are used again later."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, request in enumerate(requests):
        for block in request.blocks:
            first.setdefault(block, number)
            last[block] = number
    change = [0] * (len(requests) + 1)
    for block, number in first.items():
        if last[block] > number:
            change[number] += 1
            change[last[block]] -= 1
    most = now = 0
    for each in change:
        now += each
        most = max(most, now)
    return most


# -- clients -----------------------------------------------------------------------------------------------------------


def silent(number: int, request: Request) -> None:
    return None


def exact(number: int, request: Request) -> Hints | None:
    if request.context is None:
        return None
    name = context_id(str(request.context))
    return Hints(name, release=True) if request.gap == inf else Hints(name, request.gap)


def names(number: int, request: Request) -> Hints | None:
    return None if request.context is None else Hints(context_id(str(request.context)))


def noisy(number: int, request: Request) -> Hints | None:
    """Give exact hints, but with an error: that of the logarithm is normal with sigma 1."""
    hints = exact(number, request)
    if hints is None or hints.resume_in is None:
        return hints
    return Hints(hints.context, hints.resume_in * exp(random.Random(number).gauss(0, 1)))


def wrong(share: float) -> Say:
    """Give wrong hints for this share of the requests. Three in ten of these release a context that goes on."""

    def say(number: int, request: Request) -> Hints | None:
        choose, hints = random.Random(number), exact(number, request)
        if hints is None or choose.random() >= share:
            return hints
        if choose.random() < 0.3:
            return Hints(hints.context, release=True)
        return Hints(hints.context, exp(choose.uniform(0, log(3600))))

    return say


def hostile(number: int, request: Request) -> Hints | None:
    """Give hostile hints: requests that are never repeated claim everything, each under another name. The others give
    no hints."""
    if request.context is not None and request.gap < inf:
        return None
    return Hints(context_id(f"hostile {number}"), exp(random.Random(number).uniform(0, log(3600))))


def beside_names(others: Say) -> Say:
    """Let requests without a context claim what they use, each under another name."""

    def say(number: int, request: Request) -> Hints | None:
        return others(number, request) if request.context is not None else hostile(number, request)

    return say


CLIENTS: dict[str, Say] = {
    "exact": exact,
    "sigma 1": noisy,
    "names alone": names,
    **{f"{share:.0%} wrong": wrong(share) for share in (0.1, 0.3, 0.5)},
    "hostile": hostile,
}


# -- replay ------------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """`hits` counts those of requests in contexts. `again` counts the requests after the first one of their context. Of
    these, `poor` had less than half of the prefix that the one before had."""

    hits: int
    again: int
    poor: int
    pool: TimedPool


def replay(requests: Iterable[Request], slots: int, say: Say, policy: str = "auto") -> Found:
    pool = TimedPool(slots, policy)
    before: dict[int, int] = {}
    hits = again = poor = 0
    for number, request in enumerate(requests):
        keys = [make_key(0, block.to_bytes(32, "big")) for block in request.blocks]
        found = pool.serve(keys, request.time, hints=say(number, request))
        if request.context is not None:
            pool.engine.tick()
            hits += found
            if request.context in before:
                again += 1
                poor += found < before[request.context] / 2
            before[request.context] = len(keys)
    return Found(hits, again, poor, pool)


def run(trace: Path, say: Callable[[str], None]) -> list[Table]:
    both = agents(others=False), agents(others=True)
    return [
        _flood(agents(16, 900.0, others=False), say),
        _table("agents", both[0], working_set(both[0]) // 2, say),
        _table("agents beside one-shot requests", both[1], working_set(both[0]) // 2, say),
        *([_table("conversations", conversations(read(trace)), CONVERSATION_SLOTS, say)] if trace.exists() else []),
    ]


def _table(name: str, requests: Sequence[Request], slots: int, say: Callable[[str], None]) -> Table:
    blocks = sum(len(request.blocks) for request in requests)
    optimum = foresight_hits([request.blocks for request in requests], slots)
    base = replay(requests, slots, silent)
    rows = [_row("no hints", base, base, optimum, blocks, ""), ["MIN", f"{100 * optimum / blocks:.2f}", *("",) * 6]]
    for kind, client in CLIENTS.items():
        began = time.perf_counter()
        found = replay(requests, slots, client)
        share, points = found.hits / optimum, 100 * (found.hits - base.hits) / blocks
        least = _EXACT if kind == "exact" else _NOISY if kind == "sigma 1" else 0.0
        rows.append(_row(kind, found, base, optimum, blocks, verdict(share >= least and points >= -_WORSE)))
        say(f"{name}, {time.perf_counter() - began:.0f} s: {rows[-1]}")
    head = ["hints", "% hit", "of MIN", "points", "turns with < half", "saved, says the pool", "kept for nothing", ""]
    return Table(f"{name}: {len(requests):,} requests, {blocks:,} blocks, {slots:,} slots", head, rows)


def _flood(requests: Sequence[Request], say: Callable[[str], None]) -> Table:
    slots = working_set(requests) // 2
    blocks = sum(len(request.blocks) for request in requests)
    rows = []
    base: Found | None = None
    for kind, client in (
        ("none by anybody", silent),
        ("none by the agents", beside_names(silent)),
        ("exact by the agents", beside_names(exact)),
    ):
        found = replay(flooded(requests), slots, client)
        base = base or found
        points = 100 * (found.hits - base.hits) / blocks
        known = f"{found.pool.engine.contexts().total:,}"
        bar = "" if found is base else verdict(points >= -_WORSE)
        rows.append([kind, f"{100 * found.hits / blocks:.2f}", f"{points:+.2f}", known, bar])
        say(f"beside {NAMES:,} names: {rows[-1]}")
    head = ["hints", "% hit by the agents", "points", "contexts known", ""]
    return Table(f"{len(requests):,} turns of agents beside {NAMES:,} names that claim 8 prompts", head, rows)


def _row(kind: str, found: Found, base: Found, optimum: int, blocks: int, bar: str) -> list[str]:
    status: Any = None
    saved = wasted = ""
    if status is not None:
        saved = "" if status.saved_ratio is None else f"{100 * status.saved_ratio:+.1f} %"
        kept = status.used_again + status.never_used
        wasted = f"{status.never_used / kept:.0%}" if kept else ""
    return [
        kind,
        f"{100 * found.hits / blocks:.2f}",
        f"{found.hits / optimum:.3f}",
        f"{100 * (found.hits - base.hits) / blocks:+.2f}",
        f"{100 * found.poor / max(1, found.again):.1f} %",
        saved,
        wasted,
        bar,
    ]
