"""Request traces for the comparison of orders of eviction: public ones, and others that are generated here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from kvstow_service.replay.trace import TraceRequest, read_trace

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


def phases() -> Trace:
    """Generate 400 requests about popular documents, each with a tail that is never repeated, and 400 that read 90
    other documents in a circle, which almost fill a pool of 2,000 blocks, and so on by turns."""
    choose = random.Random(3)
    documents = [(1000 * number, choose.randint(4, 60)) for number in range(1, 401)]
    weights = list(accumulate(1 / (place + 1) ** 0.9 for place in range(len(documents))))
    now, fresh, turn = 0.0, 10**8, 0
    times, requests = list[float](), list[list[int]]()
    for number in range(_REQUESTS):
        now += choose.expovariate(1)
        times.append(now)
        if number // 400 % 2:
            first = 10**7 + 1000 * (turn % 90)
            turn += 1
            requests.append(list(range(first, first + 21)))
        else:
            ((first, length),) = choose.choices(documents, cum_weights=weights)
            own = choose.randint(1, 12)
            requests.append([*range(first, first + length), *range(fresh, fresh + own)])
            fresh += own
    return Trace("alternating phases", times, requests)


def dying() -> Trace:
    """Generate questions about 40 documents, which others replace after 600 requests, beside as many prompts that are
    never repeated."""
    choose = random.Random(4)
    documents: list[tuple[int, int]] = []
    now, fresh = 0.0, 10**8
    times, requests = list[float](), list[list[int]]()
    for number in range(_REQUESTS):
        if number % 600 == 0:
            documents = [(1000 * (number + place), choose.randint(4, 40)) for place in range(40)]
        now += choose.expovariate(1)
        times.append(now)
        first, length = choose.choice(documents) if choose.random() < 0.5 else (fresh + 100, choose.randint(4, 40))
        own = choose.randint(1, 12)
        requests.append([*range(first, first + length), *range(fresh, fresh + own)])
        fresh += 200
    return Trace("documents that die", times, requests)


def beside_liars(requests: Sequence[TraceRequest], send: Liar) -> list[TraceRequest]:
    """Return the requests beside those of a client that sends about one a second. Those have no context."""
    choose = random.Random(3)
    last, found = requests[-1].timestamp / 1000, list(requests)
    fresh, now = 10**9, 0.0
    while now < last:
        now += choose.expovariate(1)
        blocks = range(fresh, fresh + 40)
        fresh += 40
        times = list(send(now, last))
        found += [TraceRequest(1000 * at, 0, 0, blocks, end=1000 * at + 2000, stop="tool_use") for at in times]
        now += len(times) - 1
    return sorted(found, key=lambda request: request.timestamp)


Liar = Callable[[float, float], Iterator[float]]
"""Yields the times at which a prompt is sent that is sent first at the given time, in a trace of the given length."""


def _punctual(now: float, last: float) -> Iterator[float]:
    return (now + 100 * turn for turn in range(8 if now < last / 2 else 1))


LIARS: dict[str, Liar] = {
    "prompts that are sent once": lambda now, last: iter([now]),
    "prompts that are sent four times in nine seconds": lambda now, last: (now + 3 * turn for turn in range(4)),
    "prompts that come back every 100 seconds, and then a flood": _punctual,
    "prompts that are sent 16 times in three seconds": lambda now, last: (now + 0.2 * turn for turn in range(16)),
}


TRACES: dict[str, Callable[[], Trace]] = {
    "conversation": lambda: read(DATA / "conversation_trace.jsonl"),
    "synthetic": lambda: read(DATA / "synthetic_trace.jsonl"),
    "shifts": lambda: popular(shifts=True),
    "stays": lambda: popular(shifts=False),
    "sessions": sessions,
    "phases": phases,
    "dying": dying,
}
