"""Hits of real control planes on a trace of coding agents, by size and by the hints of clients, compared with LRU and
MIN.

Requests overlap as in the trace, which `kvstow trace import` makes from sessions of kv-cache-tester. Blocks are those
of a model with 128 KiB of KV per token (8B parameters, 8 KV heads, BF16). With `names`, each request names its context.
With `exact`, its end also says when the context comes back, or that it never does. With `rough`, the logarithm of that
time has a normal error with sigma 1. With `an hour`, each request asks for its blocks to be kept for an hour. MIN knows
the next use of every block.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path

from bench.report import Table
from kvstow.bytesize import format_size
from kvstow.hints import Hints, context_id
from kvstow_service.replay.hittable import FORESIGHT, GPUCache, KeysById, TimedPool, foresight_hits, overlapping_hits
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceRequest, read_trace

TRACE = Path(__file__).with_name("traces") / "agents.jsonl.gz"
SLOT_BYTES = BLOCK_TOKENS * (128 << 10)
SLOTS = tuple((size << 30) // SLOT_BYTES for size in (128, 256, 512, 1024))
CLIENTS = ("lru", "nothing said", "names", "exact", "rough", "an hour", FORESIGHT)
_HOW_TO_GET_IT = """\
there is no trace at {path}. To make it:
    git clone https://github.com/callanjfox/kv-cache-tester
    mkdir -p {path.parent}
    kvstow trace import kv-cache-tester/traces --share-system --output {path}
or name another one with --trace"""


class Client:
    """The hints of a trace's clients at the ends of their requests."""

    def __init__(self, kind: str, requests: Sequence[TraceRequest]) -> None:
        self._kind, self._requests = kind, requests
        self._gaps: list[float | None] = [None] * len(requests)
        """Seconds until the next request of the context. None if there is none."""
        following: dict[str, float] = {}
        for number in range(len(requests) - 1, -1, -1):
            request = requests[number]
            if request.context is not None:
                if request.context in following:
                    self._gaps[number] = max(0.0, following[request.context] - request.ended) / 1000
                following[request.context] = request.timestamp

    def hints(self, number: int) -> Hints | None:
        """Return the hints of the request with this number."""
        name, gap = self._requests[number].context, self._gaps[number]
        if self._kind == "an hour":
            return Hints(keep_for=3600)
        if name is None or self._kind not in ("names", "exact", "rough"):
            return None
        context = context_id(name)
        if self._kind == "names":
            return Hints(context)
        if gap is None:
            return Hints(context, release=True)
        return Hints(context, gap * exp(random.Random(number).gauss(0, 1)) if self._kind == "rough" else gap)


def run(
    path: Path,
    slots: Sequence[int],
    clients: Sequence[str],
    gpu_blocks: int | None,
    say: Callable[[str], None],
) -> list[Table]:
    """Return a table of hits, and one of writes. Without a trace, returns no tables and prints a sentence."""
    if not path.exists():
        say(_HOW_TO_GET_IT.format(path=path))
        return []
    requests = read_trace(str(path))
    blocks = sum(len(request.hash_ids) for request in requests)
    if gpu_blocks is not None:
        clients = [kind for kind in clients if kind != FORESIGHT]  # MIN cannot model a cache in front of the pool
    ids, keys = [request.hash_ids for request in requests], KeysById()
    shares, written = list[list[str]](), list[list[str]]()
    for size in slots:
        name = f"{size:,} ({format_size(size * SLOT_BYTES)})"
        shares.append([name])
        written.append([name])
        for kind in clients:
            began = time.perf_counter()
            if kind == FORESIGHT:
                hits, stored = foresight_hits(ids, size), ""
            else:
                pool = TimedPool(size, "lru" if kind == "lru" else "auto")
                gpu = None if gpu_blocks is None else GPUCache(gpu_blocks)
                hits = overlapping_hits(pool, requests, keys, hints=Client(kind, requests).hints, gpu=gpu)
                stored = f"{pool.engine.stats().stores['stored']:,}"
            shares[-1].append(f"{100 * hits / blocks:.2f}")
            written[-1].append(stored)
            say(f"{name}, {kind}, {time.perf_counter() - began:.0f} s: {shares[-1][-1]} % hit, {stored} blocks written")
    behind = "" if gpu_blocks is None else f", behind a GPU with {gpu_blocks:,}"
    head = ["slots", *clients]
    return [
        Table(f"{len(requests):,} requests, % of {blocks:,} blocks that hit{behind}", head, shares, range(len(slots))),
        Table(f"blocks written{behind}", head, written),
    ]
