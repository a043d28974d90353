"""Hits in the pool of the node service: asked for when a request arrives, taken when vLLM asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple, Protocol

from kvstow.attach.calls import Hold
from kvstow.attach.connection import Answer
from kvstow.attach.engine import Hits
from kvstow.results import KeyRun, Lease
from kvstow_service.connectors.engine_core.hits import LATER, Later
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.longesthit import longest_end
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

MOST_AHEAD = 64
"""How many requests are looked up before vLLM asks about them. What is found for them is held."""
PATIENCE_SECONDS = 0.25
"""A lookup that has no answer after this time is a miss."""
LONGEST_PATIENCE_SECONDS = 5.0
"""The same limit if the service has said that it waits: for the fleet tier up to 2 s, for memory to be registered 1
s."""
_MOST_KEYS = 100_000  # of one lookup; a frame has room for more


class Service(Protocol):
    """The part of `AttachedControl` that is used."""

    @property
    def finds_hits(self) -> bool: ...
    def find(self, keys: Sequence[bytes], hold: Hold) -> Answer[Hits]: ...
    def find_prompt(self, keys: Sequence[bytes]) -> Answer[Hits]: ...
    def wait(self, answer: Answer[Hits]) -> bool: ...
    def discard(self, answer: Answer[Hits]) -> None: ...
    def release_lease(self, lease: Lease) -> None: ...
    def is_held(self, lease: Lease) -> bool: ...


class _Question(NamedTuple):
    """A lookup of a request's tokens `start` to `end`. `keys`: the keys that were asked for. `is_last`: it asks for
    exactly the blocks of a hit from `start` to `end`, and the answer holds all of them or nothing. `fetched`: the
    tokens of blocks that the fleet tier has brought before."""

    start: int
    end: int
    keys: Sequence[bytes]
    is_last: bool
    at: float
    answer: Answer[Hits]
    fetched: tuple[range, ...] = ()


class AttachedHits:
    """A `HitFinder` that waits for answers no longer than its step may.

    With one group that attends to everything, one lookup says which blocks are present, and holds them. Otherwise the
    first lookup says which blocks are present, and a second one holds those that are needed.
    """

    def __init__(self, service: Service, groups: KVGroups, clock: Callable[[], float]) -> None:
        self._service, self._groups, self._clock = service, groups, clock
        self._questions: dict[TrackedRequest, _Question] = {}

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        if self._service.finds_hits and tracked not in self._questions and len(self._questions) < MOST_AHEAD:
            self._ask(tracked, 0, end, Hold.PRESENT)

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        question = self._questions.get(tracked)
        if question is None or not _covers(question, local, end):
            self.forget(tracked)
            if not self._service.finds_hits:
                return None
            question = self._ask(tracked, local, end, Hold.LEADING)
        while question is not None:
            if not self._service.wait(question.answer):
                patience = LONGEST_PATIENCE_SECONDS if question.answer.is_pending else PATIENCE_SECONDS
                if self._service.finds_hits and self._clock() - question.at < patience:
                    return LATER
                self.forget(tracked)
                return None
            del self._questions[tracked]
            if question.is_last or self._groups.is_plain:
                return self._take(tracked, question, local, end)
            question = self._ask_for_hit(tracked, question, local, end)
        return None

    def is_valid(self, hit: Hit) -> bool:
        return self._service.is_held(hit.lease)

    def forget(self, tracked: TrackedRequest) -> None:
        question = self._questions.pop(tracked, None)
        if question is not None:
            self._service.discard(question.answer)

    def _ask(self, tracked: TrackedRequest, start: int, end: int, hold: Hold) -> _Question | None:
        keys = [
            key
            for group in self._groups.groups
            for key in tracked.keys(group, start // group.block_tokens, end // group.block_tokens)
        ]
        if self._groups.is_plain:
            keys = keys[:_MOST_KEYS]
        return self._put(tracked, start, end, keys, hold) if 0 < len(keys) <= _MOST_KEYS else None

    def _ask_for_hit(self, tracked: TrackedRequest, said: _Question, local: int, end: int) -> _Question | None:
        """Ask for the blocks of the longest hit, now that it is known which blocks are present."""
        runs = said.answer.value.runs
        present = _Present({key for first, length in runs for key in said.keys[first : first + length]})
        end = longest_end(present, self._groups, tracked, local, end)
        keys = tracked.keys_of_places(self._groups, local, end) if end > local else ()
        return self._put(tracked, local, end, keys, Hold.ALL, self._fetched(tracked, said)) if keys else None

    def _put(
        self,
        tracked: TrackedRequest,
        start: int,
        end: int,
        keys: Sequence[bytes],
        hold: Hold,
        fetched: tuple[range, ...] = (),
    ) -> _Question:
        is_prompt = not self._groups.is_plain and hold != Hold.ALL
        answer = self._service.find_prompt(keys) if is_prompt else self._service.find(keys, hold)
        question = _Question(start, end, keys, hold == Hold.ALL, self._clock(), answer, fetched)
        self._questions[tracked] = question
        return question

    def _take(self, tracked: TrackedRequest, question: _Question, local: int, end: int) -> Hit | None:
        lease, runs, _ = question.answer.value
        if not lease.lease_id or not self._service.is_held(lease):
            return None
        if question.is_last:
            return Hit(question.start, question.end, lease, fetched=question.fetched)
        tokens = self._groups.full[0].block_tokens
        hit = _hit_at((local - question.start) // tokens, runs)
        if hit is None:
            self._service.release_lease(lease)
            return None
        first, length = hit
        return Hit(local, min(end, local + length * tokens), lease, first, self._fetched(tracked, question))

    def _fetched(self, tracked: TrackedRequest, question: _Question) -> tuple[range, ...]:
        """The tokens of the blocks that the fleet tier has brought, of an answer to `_ask`."""
        runs, found, at = question.answer.value.fetched, list[range](), 0
        for group in self._groups.groups if runs else ():
            size, number = group.block_tokens, question.start // group.block_tokens
            count = len(tracked.keys(group, number, question.end // size))
            for first, length in runs:
                begin, end = max(first, at), min(first + length, at + count)
                if begin < end:
                    found.append(range((number + begin - at) * size, (number + end - at) * size))
            at += count
        return tuple(found)


class _Present:
    """A `Presence` over a known set of keys."""

    def __init__(self, keys: Set[bytes]) -> None:
        self._keys = keys

    def lookup(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self._keys), len(keys))

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self._keys for key in keys]


def _covers(question: _Question, local: int, end: int) -> bool:
    """Whether the answer says what can be loaded from `local` on."""
    if question.is_last:
        return question.start <= local < question.end
    return question.start <= local and end <= question.end


def _hit_at(number: int, runs: Sequence[KeyRun]) -> tuple[int, int] | None:
    """The position of key `number` in the lease, which holds the keys of all runs, and how many keys its run has from
    there."""
    before = 0
    for first, length in runs:
        if first <= number < first + length:
            return before + number - first, first + length - number
        before += length
    return None
