"""Request traces for the comparison of orders of eviction: two public ones, and three that are generated here."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from kvstow_service.replay.trace import read_trace

DATA = Path(__file__).parents[2] / "shared" / "data"
_REQUESTS = 8000


class Trace(NamedTuple):
    """Requests in order: their times in seconds, and the ids of their blocks."""

    name: str
    times: list[float]
    requests: list[list[int]]


def read(path: Path) -> Trace:
    """Read a trace of the Mooncake project, or one that KVStow has written. Ends of requests are ignored: each request
    is over before the next one begins."""
    found = read_trace(str(path))
    return Trace(path.stem, [one.timestamp / 1000 for one in found], [list(one.hash_ids) for one in found])


def popular(*, shifts: bool) -> Trace:
    """Generate questions about documents, some of which are far more popular than others. With `shifts`, a few
    documents exchange their popularity all the time, and all of them do in the middle."""
    choose = random.Random(1)
    documents = [(1000 * number, choose.randint(4, 60)) for number in range(1, 1501)]
    order = list(range(len(documents)))
    weights = list(accumulate(1 / (place + 1) ** 0.9 for place in range(len(documents))))
    now, fresh = 0.0, 10**8
    times, requests = list[float](), list[list[int]]()
    for number in range(_REQUESTS):
        if shifts and number % 200 == 0:
            for _ in range(60):
                one, other = choose.randrange(len(order)), choose.randrange(len(order))
                order[one], order[other] = order[other], order[one]
        if shifts and number == _REQUESTS // 2:
            choose.shuffle(order)
        (place,) = choose.choices(range(len(order)), cum_weights=weights)
        first, length = documents[order[place]]
        own = choose.randint(1, 12)
        requests.append([1, *range(first, first + length), *range(fresh, fresh + own)])
        fresh += own
        now += choose.expovariate(3)
        times.append(now)
    return Trace("popularity that shifts" if shifts else "popularity that stays", times, requests)


def sessions() -> Trace:
    """Generate conversations. Each turn repeats all turns before it, and comes a minute later, or many minutes."""
    choose = random.Random(2)
    prompts = [list(range(5000 * number, 5000 * number + choose.randint(2, 8))) for number in range(1, 6)]
    waiting: list[tuple[float, int, list[int], int]] = []
    now, fresh = 0.0, 10**8
    times, requests = list[float](), list[list[int]]()
    while len(times) < _REQUESTS:
        now += choose.expovariate(0.6)
        while waiting and waiting[0][0] < now and len(times) < _REQUESTS:
            moment, _, ids, left = heappop(waiting)
            added = choose.randint(2, 14)
            ids = [*ids, *range(fresh, fresh + added)]
            fresh += added
            times.append(moment)
            requests.append(ids)
            if left > 1:
                heappush(waiting, (moment + choose.lognormvariate(4, 1), fresh, ids, left - 1))
        fresh += 1
        heappush(waiting, (now, fresh, [*choose.choice(prompts), fresh], 1 + int(choose.expovariate(0.2))))
        fresh += 1
    return Trace("sessions", times, requests)


TRACES: dict[str, Callable[[], Trace]] = {
    "conversation": lambda: read(DATA / "conversation_trace.jsonl"),
    "synthetic": lambda: read(DATA / "synthetic_trace.jsonl"),
    "shifts": lambda: popular(shifts=True),
    "stays": lambda: popular(shifts=False),
    "sessions": sessions,
}
