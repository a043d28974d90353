"""Claims: which blocks are expected to be used again, and when.

A client names the context of a request, and may say when its next one comes; the pool learns that otherwise. At the
request's end the context claims the blocks of its chain. A claimed block has its place by the earliest expected use of
its claims: the context that is expected last loses its blocks first, from the end of its chain, and a block that others
claim as well stays for them.

Claims and the policy share one scale, the time until the next use. A block that is idle has the more time to wait the
longer it is idle; how often idle blocks were used again says how much. That holds for what the policy would evict next,
and for contexts that are overdue. Whichever block is expected last is evicted: none is ever kept from eviction.

Clients may be wrong, or lie. A claim changes who is evicted first, but only within the time for which the policy would
have kept the blocks, too. To keep blocks longer takes trust: claims that have proved nothing share a twentieth of the
pool for that. Blocks that were claimed and used again allow more, up to half of it, and those that were kept for
nothing allow less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice, takewhile
from math import exp, inf, log, log2
from typing import NamedTuple

from kvstow.control.namespaces import Namespace
from kvstow.control.slots import RefCounts
from kvstow.control.uses import MOST_USES, Uses
from kvstow.hints import Hints
from kvstow.keys import GROUP_BYTES

MOST_CONTEXTS = 8192
"""That are known; the one that was used longest ago is forgotten first, of those that have proved nothing."""
UNPROVED_SHARE, LARGEST_SHARE = 0.05, 0.5
"""Of the pool, for blocks that are kept longer than the policy would."""
MOST_OVERDUE = 3
"""So often is an overdue context given as long again as it was idle. Then its claim ends."""
_MOST_ENTRIES = 4
"""Places in chains for each slot of the pool: contexts may share blocks."""
_LEARNING, _LEARNING_OF_ALL, _LEARNING_OF_GAP = 0.3, 0.02, 0.1
"""The share of the newest value in what is learned of a context's hints, of all contexts, and of a context's gap."""
_USUAL_GAPS = 4
"""Of all contexts, so many count in the first estimate for one."""
_GROSS_ERROR, _WRONG_SHARE = 1.5**2, 0.25
"""A hint is far from true if the logarithm of the true gap over it has a larger square. If more of them are, or more
releases are followed by a request, they are taken for names alone."""
_DUE_AT_ONCE = 256


class Switch(NamedTuple):
    """Hints were switched off because the pool does better without them, or on again. The ratios of hits are over the
    same requests."""

    is_on: bool
    ratio_with: float
    ratio_without: float
    requests: int

    def __str__(self) -> str:
        return (
            f"hints are {'used again' if self.is_on else 'not used any more'}: over the last {self.requests:,} "
            f"requests, {self.ratio_with:.1%} of the blocks would have hit with them, {self.ratio_without:.1%} without"
        )


class Returns:
    """How often what was idle for some time is used before it has been idle for twice as long. Not locked."""

    _MEMORY = 512

    def __init__(self, share: float = 0.5) -> None:
        self._waits, self._used = 16.0, 16.0 * share

    def count(self, *, used: bool) -> None:
        self._waits += 1
        self._used += used
        if self._waits > self._MEMORY:
            self._waits, self._used = self._waits / 2, self._used / 2

    @property
    def share(self) -> float:
        return self._used / self._waits

    def until_next_use(self, idle: float) -> float:
        """When to expect the next use of what was idle so long, if it is used at a rate that falls as 1 / idle: that
        rate is -log2(1 - share) / idle."""
        return idle / -log2(1.0 - min(0.99, (self._used + 0.1) / (self._waits + 0.2)))


class EvictedBlocks:
    """Blocks that the policy has evicted, watched for as long as they had been idle. Not locked; bounded."""

    _MOST_WATCHED = 4096

    def __init__(self) -> None:
        self.returns = Returns()
        self._until: dict[bytes, float] = {}

    def watch(self, keys: Sequence[bytes], idle: float, now: float) -> None:
        watched = self._until
        while watched:
            key, until = next(iter(watched.items()))
            if until > now and len(watched) <= self._MOST_WATCHED:
                break
            del watched[key]
            self.returns.count(used=False)
        watched.update(dict.fromkeys(keys, now + idle))

    def note_uses(self, keys: Sequence[bytes], now: float) -> None:
        if not self._until or self._until.keys().isdisjoint(keys):
            return
        for key in keys:
            until = self._until.pop(key, None)
            if until is not None:
                self.returns.count(used=until >= now)


class Part(NamedTuple):
    """A part of a chain that its context does not claim any more; slots that were lost since `number` are not its
    own. `ended_at`: when the context's last request ended."""

    namespace: Namespace
    slots: list[int]
    number: int
    ended_at: float


class Context:
    """What is known of a context. Changed by `Claims` alone.

    `chain`: the slots that it claims, root first; those that were lost since `number` are not its own any more. `kept`:
    how many of them it keeps longer than the policy would, of which its `credit` does not cover the `unproved`.
    `expected`: when its next request is; `inf` if none is, None if nothing is known. `overdue`: how often that time has
    passed. `marks`: some keys of the chain of its last request, each with its place from 1 on, the last one first. They
    show how much of the chain the next request uses again.
    """

    __slots__ = (
        "chain",
        "context_id",
        "credit",
        "due_at",
        "ended_at",
        "expected",
        "hint",
        "hint_error",
        "hits",
        "kept",
        "log_gap",
        "log_gap_error",
        "marks",
        "name",
        "namespace",
        "number",
        "overdue",
        "requests",
        "step_at",
        "unproved",
    )

    def __init__(self, namespace: Namespace, context_id: bytes) -> None:
        self.namespace, self.context_id = namespace, context_id
        self.chain: list[int] = []
        self.number = self.requests = self.hits = self.overdue = 0
        self.kept = self.unproved = self.credit = 0
        self.expected: float | None = None
        self.due_at = self.step_at = inf
        """When to see to it, and when it is overdue once more."""
        self.ended_at = -inf
        self.hint: float | None = None
        """The `resume_in` of its last request; `inf` for a release."""
        self.hint_error = 0.0
        self.log_gap: float | None = None
        self.log_gap_error = 1.0
        """Mean squares of the logarithm of the true gap over the hint, and over what was learned."""
        self.marks: tuple[tuple[int, bytes], ...] = ()
        self.name = ""
        """What the client calls it, for people."""


def _marks(keys: Sequence[bytes]) -> tuple[tuple[int, bytes], ...]:
    """The next request may end differently: clients often leave the reasoning out when they send a reply back."""
    length = len(keys)
    places = dict.fromkeys((length, length - 1, 7 * length // 8, 3 * length // 4, length // 2))
    return tuple((place, keys[place - 1]) for place in places if place > 0)


class Renewal:
    """A claim that is being made, slice by slice from the root. It is over once `number` is not the context's.

    `filled`: so many places of the context's chain are right. `is_whole`: a block behind an absent one is useless.
    """

    __slots__ = ("context", "filled", "is_whole", "number")

    def __init__(self, context: Context, number: int, *, is_whole: bool) -> None:
        self.context, self.number, self.is_whole = context, number, is_whole
        self.filled = 0


class Claims:
    """The contexts of a pool, and what they claim. Used under the pool's lock; each call is O(slots given).

    Slots that are claimed are in no list of an `EvictionOrder`. `attach` is called with slots that have lost their last
    claim, and `detach` with those that have got their first one, all of one namespace and in prefix order.
    """

    def __init__(
        self,
        uses: Uses,
        attach: Callable[[Namespace, list[int]], None],
        detach: Callable[[Namespace, list[int]], None],
    ) -> None:
        self.claimed = RefCounts()
        self.num_evictable = 0
        """Claimed slots that are not held. Kept by the index."""
        self.is_on = True
        self.now = 0.0
        self.policy_age = inf
        """How long the policy would keep a block."""
        self.evicted = EvictedBlocks()
        self.used_again = self.never_used = 0
        """Blocks that were kept longer than the policy would."""
        self.credit = 0.0
        """Slots for such blocks beyond those of claims that have proved nothing."""
        self.kept = 0
        """Slots of such blocks; one that several contexts keep counts for each."""
        self._uses, self._attach, self._detach = uses, attach, detach
        self._num_slots = 0
        self._new: OrderedDict[tuple[int, bytes], Context] = OrderedDict()
        self._proved: OrderedDict[tuple[int, bytes], Context] = OrderedDict()
        """Contexts with credit. Both: the one that was used longest ago first."""
        self._number = 0
        """Of the last claim that was begun."""
        self._lost: dict[int, int] = {}
        """By slot: the number of the last claim before its block was removed while it was claimed."""
        self._entries = self._unproved = 0
        self._latest: list[tuple[float, int, Context]] = []
        """A heap of contexts that are expected, the last one first, with the negative time. Here and below, entries of
        former claims are outdated."""
        self._overdue: list[tuple[float, int, Context]] = []
        """A heap of overdue contexts, the one that is idle longest first, with the end of its last request."""
        self._due: list[tuple[float, int, Context]] = []
        """A heap of times at which to see to a context."""
        self._cold: deque[Part] = deque()
        """What goes first."""
        self._leaving: deque[Part] = deque()
        """What returns to the policy once `settle` comes to it."""
        self._overdue_returns = Returns()
        self._log_gap: float | None = None
        self._hint_error = 0.0
        """Of all contexts, what each has."""
        self._gross, self._releases = Returns(0.0), Returns(0.0)
        """How often hints were far from true, and releases were followed by a request."""

    # -- contexts -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._new) + len(self._proved)

    def contexts(self) -> list[Context]:
        return [*self._new.values(), *self._proved.values()]

    def find(self, namespace: Namespace, context_id: bytes) -> Context | None:
        key = (namespace.tag, context_id)
        context = self._proved.get(key) or self._new.get(key)
        if context is not None and context.namespace is not namespace:  # the number has gone to another namespace
            self._forget(context)
            return None
        return context

    def _find_or_add(self, namespace: Namespace, context_id: bytes) -> Context:
        context = self.find(namespace, context_id)
        if context is None:
            context = Context(namespace, context_id)
            context.hint_error = self._hint_error
            if len(self) >= MOST_CONTEXTS:
                self._forget(next(iter((self._new or self._proved).values())))
            self._new[(namespace.tag, context_id)] = context
        return context

    def _forget(self, context: Context) -> None:
        self.leave(context)
        self._renumber(context)
        key = (context.namespace.tag, context.context_id)
        (self._proved if self._proved.get(key) is context else self._new).pop(key, None)

    def _touch(self, context: Context) -> None:
        """It was used, and its credit may have changed."""
        key = (context.namespace.tag, context.context_id)
        self._new.pop(key, None)
        self._proved.pop(key, None)
        (self._proved if context.credit > 0 else self._new)[key] = context

    # -- claiming -------------------------------------------------------------------------------------------

    def begin(self, namespace: Namespace, hints: Hints, keys: Sequence[bytes], now: float) -> Renewal:
        """A request with hints has ended. `keys`: its chain, without repeats. `extend` then claims its blocks, and
        `finish` follows."""
        assert hints.context is not None
        self.now = max(self.now, now)
        self._pass_time()
        context = self._find_or_add(namespace, hints.context)
        if self._lost and context.chain:  # from here on, all of the chain is its own
            own = self._own(context.chain, context.number)
            self._cut(context, len(own))
            context.chain = own
        if context.requests:
            self._learn(context, keys, now)
        self._renumber(context)
        context.ended_at, context.overdue, context.kept = now, 0, 0
        context.requests += 1
        context.marks = _marks(keys)
        context.name = hints.name
        context.hint = inf if hints.release else hints.resume_in
        self._touch(context)
        self._expect(context, self._expected(context, now))
        return Renewal(context, context.number, is_whole=not keys or keys[0][:GROUP_BYTES] == keys[-1][:GROUP_BYTES])

    def _learn(self, context: Context, keys: Sequence[bytes], now: float) -> None:
        """Take what the context's return says of its claim, its hint and its gaps."""
        gap = log(max(now - context.ended_at, 1e-3))
        hint, learned = context.hint, context.log_gap
        if context.overdue:
            self._overdue_returns.count(used=context.overdue <= MOST_OVERDUE)
        used = next((place for place, key in context.marks if place <= len(keys) and keys[place - 1] == key), 0)
        kept, self.kept = context.kept, self.kept - context.kept
        self._unproved -= context.unproved
        context.kept = context.unproved = 0
        if context.expected is not None:
            self.used_again += min(kept, used)
            context.hits += used
            context.credit = min(context.credit + used, 2 * used)
            self.credit = min(self.credit + used, (LARGEST_SHARE - UNPROVED_SHARE) * self._num_slots)
        if kept > used:
            self._fade(context, kept - used)
        if hint == inf:
            self._releases.count(used=True)
        elif hint is not None:
            error = (gap - log(max(hint, 1e-3))) ** 2
            context.hint_error += (error - context.hint_error) * _LEARNING
            self._hint_error += (error - self._hint_error) * _LEARNING_OF_ALL
            self._gross.count(used=error > _GROSS_ERROR)
        usual = gap if self._log_gap is None else self._log_gap
        learned = usual if learned is None else learned
        context.log_gap_error += ((gap - learned) ** 2 - context.log_gap_error) * _LEARNING
        context.log_gap = learned + (gap - learned) / min(context.requests + _USUAL_GAPS, 1 / _LEARNING_OF_GAP)
        self._log_gap = usual + (gap - usual) * _LEARNING_OF_ALL

    def _fade(self, context: Context, count: int) -> None:
        """So many blocks were kept for nothing."""
        self.never_used += count
        context.credit = max(0, context.credit - count)
        self.credit = max(0.0, self.credit - count)

    def _expected(self, context: Context, now: float) -> float | None:
        """A hint counts for as much as earlier ones were right."""
        learned = context.log_gap if context.log_gap is not None else self._log_gap
        hint = context.hint
        if hint == inf:
            if self._releases.share < _WRONG_SHARE:
                self._releases.count(used=False)
                return inf
        elif hint is not None and self._gross.share < _WRONG_SHARE:
            if learned is None:
                return now + hint
            weight = (context.log_gap_error + 1e-9) / (context.log_gap_error + context.hint_error + 1e-9)
            return now + exp(weight * log(max(hint, 1e-3)) + (1.0 - weight) * learned)
        return None if learned is None else now + exp(learned)

    def _renumber(self, context: Context) -> None:
        """What the heaps have of it is outdated."""
        self._number += 1
        context.number = self._number

    def _expect(self, context: Context, expected: float | None) -> None:
        """Its claim has this place from now on."""
        context.expected = expected
        context.step_at = inf if expected is None else expected
        if not self.is_on or expected is None:
            context.due_at = inf
            return
        self._list(context)
        self._see_later(context)

    def _list(self, context: Context) -> None:
        """Its blocks can be evicted."""
        if context.overdue:
            entry = (context.ended_at, context.number, context)
            self._overdue = _pushed(self._overdue, entry, len(self), _is_overdue)
        elif context.expected is not None:
            entry = (-context.expected, context.number, context)
            self._latest = _pushed(self._latest, entry, len(self), _is_expected)

    def _see_later(self, context: Context) -> None:
        context.due_at = context.step_at
        if context.chain and not context.kept:
            context.due_at = min(context.due_at, context.ended_at + self.policy_age)
        if context.due_at < inf:
            self._due = _pushed(self._due, (context.due_at, context.number, context), len(self), _is_due)

    def extend(self, renewal: Renewal, slots: Sequence[int | None]) -> bool:
        """Claim the next blocks of the chain, which are in these slots; None for absent ones. Returns whether to go
        on behind them."""
        context = renewal.context
        if context.number != renewal.number or context.expected is None or not self.is_on:
            return False
        self.settle(2 * len(slots))
        present = [slot for slot in slots if slot is not None]
        goes_on = len(present) == len(slots) or not renewal.is_whole
        if not goes_on:
            present = list(slots[: slots.index(None)])  # type: ignore[arg-type]
        at, chain = renewal.filled, context.chain
        known = chain[at : at + len(present)]
        if known != present:
            pairs = zip(known, present, strict=False)
            same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(known))
            self.leave(context, at + same)
            fresh = present[same:]
            granted = self._without_lost(fresh, context.number)[
                : max(0, _MOST_ENTRIES * self._num_slots - self._entries)
            ]
            goes_on = goes_on and len(granted) == len(fresh)
            self._add(context, granted)
            at += same + len(granted)
        else:
            at += len(known)
        renewal.filled = at
        return goes_on

    def finish(self, renewal: Renewal) -> None:
        """All of the chain was given to `extend`, or as much as it wanted."""
        context = renewal.context
        if context.number != renewal.number:
            return
        self.leave(context, renewal.filled)
        if context.expected == inf:
            self._release(context)

    def _release(self, context: Context) -> None:
        """None of its blocks is expected to be used again. Those become cold that no other request has used, the end of
        the chain: from where on blocks have no more uses than the context has had requests."""
        uses, most, chain = self._uses, min(context.requests, MOST_USES - 1), context.chain
        low = bisect_left(range(len(chain)), True, key=lambda at: uses.of(chain[at]) <= most)
        self._cool(context, low)
        self.leave(context)

    def _without_lost(self, slots: list[int], number: int) -> list[int]:
        """Those before the first that the chain has already, and that has lost what it held since."""
        lost = self._lost
        return list(takewhile(lambda slot: lost.get(slot, 0) < number, slots)) if lost else slots

    def _add(self, context: Context, slots: list[int]) -> None:
        if slots:
            if not context.chain:  # an eviction meanwhile has left it out
                self._list(context)
            context.chain += slots
            self._entries += len(slots)
            first = self.claimed.increment(slots)
            if first:
                self._detach(context.namespace, first)

    # -- ends of claims -------------------------------------------------------------------------------------

    def _cut(self, context: Context, length: int) -> list[int]:
        """Its chain is so long from now on. Returns what was cut off; O(that), however long the chain is."""
        if not length:
            end, context.chain = context.chain, []
        else:
            end = context.chain[length:]
            del context.chain[length:]
        self._entries -= len(end)
        if context.kept > length:
            self._fade(context, context.kept - length)
            self._keep(context, length)
        return end

    def _keep(self, context: Context, count: int) -> None:
        """It keeps so many blocks longer than the policy would."""
        unproved = max(0, count - context.credit)
        self.kept += count - context.kept
        self._unproved += unproved - context.unproved
        context.kept, context.unproved = count, unproved

    def leave(self, context: Context, start: int = 0) -> None:
        """Its claim ends from this place on: the blocks return to the policy."""
        self._split(context, start, self._leaving)

    def _cool(self, context: Context, start: int = 0) -> None:
        """The same: the blocks go first."""
        self._split(context, start, self._cold)

    def _split(self, context: Context, start: int, parts: deque[Part]) -> None:
        slots = self._cut(context, start)
        if slots:
            parts.append(Part(context.namespace, slots, context.number, context.ended_at))
            self._entries += len(slots)

    def _own(self, slots: list[int], number: int) -> list[int]:
        """Those of the slots that have not lost their block since a claim with this number was made."""
        lost = self._lost
        return [slot for slot in slots if lost.get(slot, 0) < number] if lost else slots

    def _take_from(self, parts: deque[Part], count: int) -> Part:
        """Up to so many slots of the first part, from its end."""
        part = parts[0]
        if len(part.slots) <= count:
            parts.popleft()
        else:
            slots = part.slots[-count:]
            del part.slots[-count:]
            part = part._replace(slots=slots)
        self._entries -= len(part.slots)
        return part

    @property
    def is_leaving(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._leaving)

    def settle(self, count: int) -> None:
        """Return up to so many slots of claims that have ended to the policy."""
        while self._leaving and count > 0:
            part = self._take_from(self._leaving, count)
            count -= len(part.slots)
            free = self.claimed.decrement(self._own(part.slots, part.number))
            if free:
                self._attach(part.namespace, free)

    # -- time -----------------------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        """See to contexts that become overdue, or are kept longer than the policy would."""
        due, now = self._due, self.now
        for _ in range(_DUE_AT_ONCE):
            if not due or due[0][0] > now:
                return
            entry = heappop(due)
            if _is_due(entry):
                self._see_to(entry[2], now)
                due = self._due

    def _see_to(self, context: Context, now: float) -> None:
        idle = now - context.ended_at
        if context.chain and not context.kept and idle >= self.policy_age:
            shared = max(0, self.allowed - self._unproved)
            left = int(LARGEST_SHARE * self._num_slots) - self.kept
            count = max(0, min(context.credit + shared, left, len(context.chain)))
            if context.overdue > MOST_OVERDUE:
                count = 0
            self._cool(context, count)
            self._keep(context, count)
        if now >= context.step_at:
            if context.overdue:
                self._overdue_returns.count(used=False)
            context.overdue += 1
            if context.overdue == 1:
                self._list(context)
            context.step_at = now + max(idle, 1e-3)
            if context.overdue > MOST_OVERDUE:
                if context.kept:
                    self._cool(context)
                context.step_at = inf  # what is left becomes cold when the policy would evict it
        self._see_later(context)

    # -- eviction -------------------------------------------------------------------------------------------

    def _last(self) -> Context | None:
        """The expected context that is expected last, of those with blocks."""
        heap = self._latest
        while heap and not (_is_expected(heap[0]) and heap[0][2].chain):
            heappop(heap)
        return heap[0][2] if heap else None

    def _longest_overdue(self) -> Context | None:
        heap = self._overdue
        while heap and not (_is_overdue(heap[0]) and heap[0][2].chain):
            heappop(heap)
        return heap[0][2] if heap else None

    def _next(self) -> tuple[float, Context | None]:
        """How long to wait for the next use of the claimed block that goes first, and whose it is."""
        last, overdue = self._last(), self._longest_overdue()
        wait = -inf if last is None or last.expected is None else last.expected - self.now
        if overdue is not None:
            other = self._overdue_returns.until_next_use(self.now - overdue.ended_at)
            if other > wait:
                return other, overdue
        return wait, last

    def go_first(self, idle: float | None) -> bool:
        """Whether a claimed block is evicted next. `idle`: of the policy's next one; None if it has none."""
        return bool(self._cold) or idle is None or self._next()[0] > self.evicted.returns.until_next_use(idle)

    def take(self, count: int) -> tuple[Namespace | None, list[int]]:
        """Of the `count` claimed slots that go first, which lose that claim, those that have no other claim and that no
        other request has used; and their namespace. None without claims."""
        if self._cold:
            part = self._take_from(self._cold, count)
            return part.namespace, self._unclaim(part)
        context = self._next()[1]
        if context is None:
            return None, []
        slots = self._cut(context, max(0, len(context.chain) - count))
        return context.namespace, self._unclaim(Part(context.namespace, slots, context.number, context.ended_at))

    def _unclaim(self, part: Part) -> list[int]:
        free = self.claimed.decrement(self._own(part.slots, part.number))
        used_at, ended_at = self._uses.times.used_times, part.ended_at
        used = [slot for slot in free if used_at[slot] > ended_at]  # by another request
        if used:
            self._attach(part.namespace, used)
            free = [slot for slot in free if used_at[slot] <= ended_at]
        return free

    def blocks_of(self, context: Context, start: int, stop: int, *, alone: bool) -> list[int]:
        """The slots that it claims, from a place of its chain to another. `alone`: those that no other context claims
        and no other request has used."""
        slots = self._own(context.chain[start:stop], context.number)
        if alone:
            used_at, claimed = self._uses.times.used_times, self.claimed
            slots = [slot for slot in slots if claimed.count(slot) == 1 and used_at[slot] <= context.ended_at]
        return slots

    def next_slots(self) -> Iterator[int]:
        """The claimed slots, about in the order of eviction. Nothing must change meanwhile."""
        seen = set[int]()
        contexts = [context for context in self.contexts() if context.chain]
        contexts.sort(key=lambda context: -(context.expected or 0.0))
        parts = (Part(context.namespace, context.chain, context.number, 0.0) for context in contexts)
        for part in chain(self._cold, self._leaving, parts):
            for slot in reversed(self._own(part.slots, part.number)):
                if slot not in seen:  # several contexts may claim it
                    seen.add(slot)
                    yield slot

    # -- what happens to slots ------------------------------------------------------------------------------

    def note_uses(self, keys: Sequence[bytes], now: float) -> None:
        """A request has used these blocks."""
        self.now = max(self.now, now)
        self.evicted.note_uses(keys, now)

    @property
    def allowed(self) -> int:
        """So many blocks may be kept longer than the policy would, by contexts without credit of their own."""
        return int(UNPROVED_SHARE * self._num_slots + self.credit)

    def unclaimed(self, slots: list[int]) -> list[int]:
        """Those of the slots that are not claimed, in the order given."""
        return self.claimed.free_of(slots)

    def forget(self, slots: Iterable[int]) -> None:
        """These slots have lost their blocks."""
        claimed = [slot for slot in slots if slot in self.claimed]
        self.claimed.clear(claimed)
        self._lost.update(dict.fromkeys(claimed, self._number))

    def set_num_slots(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.credit = min(self.credit, (LARGEST_SHARE - UNPROVED_SHARE) * num_slots)

    def tick(self, now: float, count: int) -> None:
        """Time has passed. About once a second; O(count), and O(contexts) after claimed blocks were lost."""
        self.now = max(self.now, now)
        self._pass_time()
        self.settle(count)
        if self._lost:
            numbers = [context.number for context in self.contexts() if context.chain]
            parts = (part.number for part in chain(self._leaving, self._cold))
            oldest = min([*numbers, *parts], default=self._number + 1)
            for slot in list(islice(self._lost, count)):
                number = self._lost.pop(slot)
                if number >= oldest:
                    self._lost[slot] = number  # again, as the last one

    # -- steering -------------------------------------------------------------------------------------------

    def set_on(self, is_on: bool) -> None:
        """Use hints, or claim nothing: then contexts are only learned of. O(contexts)."""
        self.is_on = is_on
        if not is_on:
            for context in self.contexts():
                self.leave(context)
                context.due_at = inf
            self._leaving += self._cold
            self._cold.clear()
            self._latest, self._overdue, self._due = [], [], []

    def expect(self, context: Context, resume_in: float | None, now: float) -> None:
        """An operator says when the next request comes; None: none does."""
        self.now = max(self.now, now)
        self._keep(context, 0)
        context.overdue, context.hint = 0, None
        self._expect(context, inf if resume_in is None else now + resume_in)
        if resume_in is None:
            self._release(context)

    # -- integrity ------------------------------------------------------------------------------------------

    def defects(self, visible: set[int]) -> list[str]:
        """Inconsistencies. O(contexts and their blocks): for integrity checks."""
        found: list[str] = []
        contexts = self.contexts()
        parts = [*self._leaving, *self._cold]
        parts += [Part(context.namespace, context.chain, context.number, 0.0) for context in contexts]
        holders: Counter[int] = Counter()
        for part in parts:
            holders.update(self._own(part.slots, part.number))
        if holders != {slot: self.claimed.count(slot) for slot in self.claimed.slots()}:
            found.append("the claimed slots are not those of contexts")
        if not self.claimed.slots() <= visible:
            found.append("a claimed slot is not visible")
        sums = (
            (self._entries, sum(len(part.slots) for part in parts)),
            (self.kept, sum(context.kept for context in contexts)),
            (self._unproved, sum(context.unproved for context in contexts)),
        )
        if any(count != total for count, total in sums):
            found.append(f"the counts of claims are wrong: {sums}")
        listed = {(id(entry[2]), entry[1]) for entry in self._latest if _is_expected(entry)}
        listed |= {(id(entry[2]), entry[1]) for entry in self._overdue if _is_overdue(entry)}
        if any(context.chain and (id(context), context.number) not in listed for context in contexts):
            found.append("a claim cannot be evicted")
        return found


_Entry = tuple[float, int, Context]


def _is_expected(entry: _Entry) -> bool:
    expected, number, context = entry
    return context.number == number and not context.overdue and context.expected == -expected


def _is_overdue(entry: _Entry) -> bool:
    return entry[2].number == entry[1] and bool(entry[2].overdue)


def _is_due(entry: _Entry) -> bool:
    return entry[2].number == entry[1] and entry[2].due_at == entry[0]


def _pushed(heap: list[_Entry], entry: _Entry, num_contexts: int, is_current: Callable[[_Entry], bool]) -> list[_Entry]:
    """The heap with the entry, without outdated ones if there are many."""
    heappush(heap, entry)
    if len(heap) > 2 * num_contexts + 64:
        heap = [each for each in heap if is_current(each)]
        heapify(heap)
    return heap
