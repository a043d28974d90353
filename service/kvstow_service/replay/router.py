"""Which node of a fleet gets a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from kvstow.errors import ConfigError
from kvstow.keys import BlockKey
from kvstow_service.replay.trace import TraceRequest

Routing = Literal["prefix", "random"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)

_BOUND = 1.25
"""A node gets no request while its load is so many times the mean."""
_HALF_LIFE_MS = 60_000.0


class Router:
    """Sends requests to `nodes` nodes, in the order of a trace.

    `prefix`: to the node whose pool has the longest leading run of the request's keys, among those whose load is near
    the mean; the load is the blocks that a node was given, those of a minute ago counting half. `random`: to any node,
    the same ones in each replay.
    """

    def __init__(self, nodes: int, routing: Routing, lookup: Callable[[int, Sequence[BlockKey]], int]) -> None:
        """`lookup`: how many leading keys the pool of a node has."""
        if routing not in ROUTINGS:
            raise ConfigError("routing", routing, " or ".join(ROUTINGS))
        self._routing, self._lookup = routing, lookup
        self._loads = [0.0] * nodes
        self._now = 0.0
        self._random = random.Random(0)

    def node_for(self, request: TraceRequest) -> int:
        """The node that is to serve the request."""
        blocks = len(request.hash_ids)
        faded = 0.5 ** ((request.timestamp - self._now) / _HALF_LIFE_MS)
        self._now = request.timestamp
        self._loads = [load * faded for load in self._loads]
        node = self._random.randrange(len(self._loads)) if self._routing == "random" else self._best(request, blocks)
        self._loads[node] += blocks
        return node

    def _best(self, request: TraceRequest, blocks: int) -> int:
        most = _BOUND * (sum(self._loads) + blocks) / len(self._loads)
        keys = request.keys()
        able = [node for node, load in enumerate(self._loads) if load <= most]
        return max(able, key=lambda node: (self._lookup(node, keys), -self._loads[node]))
