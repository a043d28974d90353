"""Contexts: names that clients give to chains of blocks, so that people can list, release, purge and prefetch them.

A name does not change the order of eviction. Only the way in which a request ends does that (`kvstow.endings`), and
only for the chain of that request.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from kvstow.control.chains import Watch
from kvstow.control.namespaces import Namespace
from kvstow.hints import Hints

MOST_CONTEXTS = 1 << 14
MOST_KEYS = 1 << 20
"""How many keys all contexts may have together. A key takes 8 bytes, and more if its block is not in the pool."""


class Context:
    """The blocks that the last request with a name has used. `watches` are the watches of the parts of its chain. While
    a part still has that watch, no other request has used its blocks. `expected` is the time of the next request on the
    pool's clock. It is infinite if no request will follow, and None if this is unknown."""

    __slots__ = ("chain", "context_id", "ended_at", "expected", "name", "namespace", "requests", "watches")

    def __init__(self, context_id: bytes, name: str, namespace: Namespace) -> None:
        self.context_id, self.name, self.namespace = context_id, name, namespace
        self.chain: Sequence[bytes] = ()
        self.watches: list[Watch] = []
        self.requests = 0
        self.ended_at = 0.0
        self.expected: float | None = None


class _Place(NamedTuple):
    """What identifies a context: the number of its namespace, its id, and the first key of its chain."""

    tag: int
    context_id: bytes
    root: bytes


class Contexts:
    """The contexts of a pool that were used last. The caller holds the pool's lock. `note` is O(1), apart from the
    contexts that it drops.

    A context is identified by its namespace, its id (which depends on the name and the cache salt) and the first block
    of its chain. So a request whose chain begins with another block has another context, even if it knows the name.
    """

    def __init__(self) -> None:
        self._contexts: dict[_Place, Context] = {}
        self._by_id: dict[bytes, set[_Place]] = {}
        self._num_keys = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def note(
        self, namespace: Namespace, hints: Hints, chain: Sequence[bytes], watches: list[Watch], now: float
    ) -> None:
        """Note that a request has ended that has used this chain. Does nothing if its client has named no context, and
        forgets the context if its client has released it."""
        if hints.context is None or not chain:
            return
        place = _Place(namespace.tag, hints.context, chain[0])
        context = self._forget(place)
        if hints.release or len(chain) > MOST_KEYS:
            return
        if context is None or context.namespace is not namespace:
            context = Context(hints.context, hints.name, namespace)
        context.name, context.chain, context.watches = hints.name, chain, watches
        context.requests += 1
        context.ended_at = now
        context.expected = None if hints.resume_in is None else now + hints.resume_in
        self._contexts[place] = context
        self._by_id.setdefault(hints.context, set()).add(place)
        self._num_keys += len(chain)
        while len(self._contexts) > MOST_CONTEXTS or self._num_keys > MOST_KEYS:
            self._forget(next(iter(self._contexts)))

    def _forget(self, place: _Place) -> Context | None:
        context = self._contexts.pop(place, None)
        if context is not None:
            self._num_keys -= len(context.chain)
            places = self._by_id[context.context_id]
            places.discard(place)
            if not places:
                del self._by_id[context.context_id]
        return context

    def drop(self, context: Context) -> None:
        """Forget the context."""
        if context.chain:
            self._forget(_Place(context.namespace.tag, context.context_id, context.chain[0]))

    def find(self, context_id: bytes) -> list[Context]:
        """Return the contexts with this id, in all namespaces."""
        return [self._contexts[place] for place in sorted(self._by_id.get(context_id, ()))]

    def all(self) -> list[Context]:
        return list(self._contexts.values())


def seconds_to(context: Context, now: float) -> float | None:
    """Return the seconds until the next request of the context is expected. None if no request is expected, or if it is
    unknown when."""
    return None if context.expected is None or context.expected == inf else context.expected - now
