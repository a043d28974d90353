"""Claims: which blocks are expected to be used again, and when.

A client names the context of a request, and may say when its next one comes; the pool learns that otherwise. At the
request's end the context claims the blocks of its chain. A claimed block has its place by the earliest expected use of
its claims: the context that is expected last loses its blocks first, from the end of its chain, and a block that others
claim as well stays for them.

Claims and the policy share one scale, the time until the next use. What the policy would evict next was idle for some
time; how often such blocks are used again soon after their eviction says when to expect their next use. Whichever block
is expected later is evicted, so no block is ever kept from eviction.

Clients may be wrong, or lie. Claims that have proved nothing share a twentieth of the pool. Blocks that were claimed
and used again allow more, up to half of it, and those that were not allow less.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
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
"""Of the pool, for claims."""
_MOST_ENTRIES = 4
"""Places in chains for each slot of the pool: contexts may share blocks."""
MOST_OVERDUE = 3
"""So often is an overdue context expected after as long again as it was idle. Then its claim ends."""
_GAP_SHARE = 0.3
"""Of the last gap in what is learned of gaps."""
_SLICE = 1024
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
            f"hints are {'used again' if self.is_on else 'not used any more'}: over the last {self.requests:,} requests,"
            f" {self.ratio_with:.1%} of the blocks would have hit with them and {self.ratio_without:.1%} without"
        )


class Context:
    """What is known of a context. Changed by `Claims` alone.

    `chain`: the slots that it claims, root first; those that were lost since `number` are not its own any more.
    `expected`: when its next request is; `inf` if none is, None if nothing is known. `length` and `last_key`: of the
    chain of its last request. `credit`: blocks that it may claim because its requests have used as many again.
    """

    __slots__ = (
        "chain",
        "context_id",
        "credit",
        "ended_at",
        "expected",
        "hits",
        "is_hinted",
        "last_key",
        "length",
        "log_gap",
        "namespace",
        "number",
        "overdue",
        "requests",
        "unproved",
    )

    def __init__(self, namespace: Namespace, context_id: bytes) -> None:
        self.namespace, self.context_id = namespace, context_id
        self.chain: list[int] = []
        self.number = 0
        self.expected: float | None = None
        self.ended_at = -inf
        self.is_hinted = False
        self.overdue = 0
        self.requests = self.hits = 0
        self.log_gap: float | None = None
        self.length = 0
        self.last_key = b""
        self.credit = 0
        self.unproved = 0
        """Blocks of the chain beyond its credit."""


class Renewal:
    """A claim that is being made, slice by slice from the root. It is over once `number` is not the context's.

    `filled`: so many places of the context's chain are right. `is_whole`: a block behind an absent one is useless.
    """

    __slots__ = ("context", "filled", "is_whole", "number")

    def __init__(self, context: Context, number: int, *, is_whole: bool) -> None:
        self.context, self.number, self.is_whole = context, number, is_whole
        self.filled = 0


class Regret:
    """How often blocks are used again soon after the policy has evicted them. Not locked; bounded.

    A block is watched for as long as it had been idle. If a share p of them is used again meanwhile, idle blocks are
    used at a rate of a = -log2(1 - p) for each time that they were idle.
    """

    _MOST_WATCHED = 4096
    _MEMORY = 512

    def __init__(self) -> None:
        self._watched: dict[bytes, tuple[float, float]] = {}
        self._evicted, self._used = 16.0, 8.0

    def watch(self, keys: Sequence[bytes], idle: float, now: float) -> None:
        """The policy has evicted these blocks."""
        self._expire(now)
        for key in keys:
            self._watched[key] = (now, now + idle)

    def _expire(self, now: float) -> None:
        watched = self._watched
        while watched:
            key, (_, until) = next(iter(watched.items()))
            if until > now and len(watched) <= self._MOST_WATCHED:
                return
            del watched[key]
            self._count(used=False)

    def note_uses(self, keys: Sequence[bytes], now: float) -> None:
        watched = self._watched
        if not watched or watched.keys().isdisjoint(keys):
            return
        for key in keys:
            found = watched.pop(key, None)
            if found is not None:
                self._count(used=found[1] >= now)

    def _count(self, *, used: bool) -> None:
        self._evicted += 1
        self._used += used
        if self._evicted > self._MEMORY:
            self._evicted, self._used = self._evicted / 2, self._used / 2

    def until_next_use(self, idle: float) -> float:
        """Of a block that was idle so long."""
        share = min(0.99, (self._used + 0.1) / (self._evicted + 0.2))
        return idle / -log2(1.0 - share)


def _learned(value: float | None, new: float) -> float:
    return new if value is None else value + _GAP_SHARE * (new - value)


def _is_current(entry: tuple[float, int, Context]) -> bool:
    """Whether an entry of a heap is that of the context's present claim."""
    expected, number, context = entry
    return context.number == number and context.expected == abs(expected)


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
        """Claimed slots that are neither held nor protected. Kept by the index."""
        self.is_on = True
        self.now = 0.0
        self.regret = Regret()
        self.used_again = self.never_used = 0
        self.credit = 0.0
        """Slots that claims may have beyond those that have proved nothing."""
        self._uses, self._attach, self._detach = uses, attach, detach
        self._num_slots = 0
        self._new: OrderedDict[tuple[int, bytes], Context] = OrderedDict()
        self._proved: OrderedDict[tuple[int, bytes], Context] = OrderedDict()
        """Contexts with credit. Both: the one that was used longest ago first."""
        self._number = 0
        """Of the last claim that was begun."""
        self._lost: dict[int, int] = {}
        """By slot: the number of the last claim before its block was removed while it was claimed."""
        self._entries = self._released_entries = self._unproved = 0
        self._latest: list[tuple[float, int, Context]] = []
        """A heap of claims, the one that is expected last first. Entries of earlier claims are outdated."""
        self._due: list[tuple[float, int, Context]] = []
        """The same, the one that is expected first first."""
        self._released: deque[tuple[Context, int]] = deque()
        self._leaving: deque[tuple[Namespace, list[int], int]] = deque()
        """Slots of claims that have ended, with the number of the claim, until `settle` comes to them."""
        self._num_leaving = 0
        self._log_gap: float | None = None
        """Of all contexts."""

    # -- contexts -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._new) + len(self._proved)

    def __iter__(self) -> Iterator[int]:
        """The claimed slots in the order of eviction, some of them repeatedly. Nothing must change meanwhile."""
        contexts = [context for context in self.contexts() if context.expected is not None]
        contexts.sort(key=lambda context: -(context.expected or 0.0))
        for context in contexts:
            yield from reversed(self._own(context.chain, context.number))
        for _, slots, number in self._leaving:
            yield from reversed(self._own(slots, number))

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
            if len(self) >= MOST_CONTEXTS:
                self._forget(next(iter((self._new or self._proved).values())))
            self._new[(namespace.tag, context_id)] = context
        return context

    def _forget(self, context: Context) -> None:
        self._end(context)
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
            self._set_chain(context, self._own(context.chain, context.number))
        self._prove(context, keys, now)
        self._renumber(context)
        context.ended_at, context.overdue = now, 0
        context.requests += 1
        context.length, context.last_key = len(keys), keys[-1] if keys else b""
        self._touch(context)
        self._expect(context, self._expected(context, hints, now))
        return Renewal(context, context.number, is_whole=not keys or keys[0][:GROUP_BYTES] == keys[-1][:GROUP_BYTES])

    def _prove(self, context: Context, keys: Sequence[bytes], now: float) -> None:
        """Take what the context's return says of its claim."""
        if not context.requests:
            return
        gap = log(max(now - context.ended_at, 1e-3))
        context.log_gap = _learned(context.log_gap, gap)
        self._log_gap = _learned(self._log_gap, gap)
        length = context.length
        if context.expected is not None and 0 < length <= len(keys) and keys[length - 1] == context.last_key:
            context.credit = min(context.credit + length, 2 * length)
            self.credit = min(self.credit + length, (LARGEST_SHARE - UNPROVED_SHARE) * self._num_slots)

    def _fade(self, context: Context, count: int) -> None:
        """So many blocks that it has claimed were not used again."""
        context.credit = max(0, context.credit - count)
        self.credit = max(0.0, self.credit - count)

    def _expected(self, context: Context, hints: Hints, now: float) -> float | None:
        context.is_hinted = hints.release or hints.resume_in is not None
        if hints.release:
            return inf
        if hints.resume_in is not None:
            return now + hints.resume_in
        log_gap = context.log_gap if context.log_gap is not None else self._log_gap
        return None if log_gap is None else now + exp(log_gap)

    def _renumber(self, context: Context) -> None:
        """What the heaps have of it is outdated."""
        self._number += 1
        context.number = self._number

    def _expect(self, context: Context, expected: float | None) -> None:
        """Its claim has this place from now on."""
        was_released, is_released = context.expected == inf, expected == inf
        self._released_entries += (is_released - was_released) * len(context.chain)
        context.expected = expected
        self._recount(context)
        if expected is None or not self.is_on:
            return
        if is_released:
            self._released.append((context, context.number))
            return
        heappush(self._latest, (-expected, context.number, context))
        heappush(self._due, (expected, context.number, context))
        if len(self._latest) > 2 * len(self) + 64:
            self._latest = [entry for entry in self._latest if _is_current(entry)]
            heapify(self._latest)
        if len(self._due) > 2 * len(self) + 64:
            self._due = [entry for entry in self._due if _is_current(entry)]
            heapify(self._due)

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
            same = next((n for n, (one, other) in enumerate(zip(known, present, strict=False)) if one != other), len(known))
            if same < len(known):
                self._disprove(context, at + same)
            fresh = present[same:]
            granted = self._without_lost(fresh[: self._room(context)], context.number)
            goes_on = goes_on and len(granted) == len(fresh)
            self._add(context, granted)
            known = known[:same]
            at += len(granted)
        context.hits += len(known)
        self.used_again += len(known)
        renewal.filled = at + len(known)
        self._demote()
        return goes_on

    def finish(self, renewal: Renewal) -> None:
        """All of the chain was given to `extend`, or as much as it wanted."""
        context = renewal.context
        if context.number != renewal.number:
            return
        if renewal.filled < len(context.chain):
            self._disprove(context, renewal.filled)
        if context.expected == inf:
            self._spare_shared(context)

    def _disprove(self, context: Context, start: int) -> None:
        """The context has come back without the blocks that it has claimed from this place on."""
        count = len(context.chain) - start
        self.never_used += count
        self._fade(context, count)
        self._leave(context, start)

    def _spare_shared(self, context: Context) -> None:
        """Only blocks that no other request has used become cold, the end of the chain: from where on blocks have no
        more uses than the context has had requests."""
        uses, most = self._uses, min(context.requests, MOST_USES - 1)
        chain = context.chain
        low = bisect_left(range(len(chain)), True, key=lambda at: uses.of(chain[at]) <= most)
        self._add_leaving(context, chain[:low])
        self._set_chain(context, chain[low:])

    def _room(self, context: Context) -> int:
        """How many blocks more it may claim."""
        room = _MOST_ENTRIES * self._num_slots - self._entries
        if context.expected == inf:
            return max(0, room)
        shared = UNPROVED_SHARE * self._num_slots + self.credit - self._unproved
        return max(0, min(room, max(0, context.credit - len(context.chain)) + max(0, int(shared))))

    def _without_lost(self, slots: list[int], number: int) -> list[int]:
        """Those before the first that the chain has already, and that has lost what it held since."""
        lost = self._lost
        if lost:
            return list(takewhile(lambda slot: lost.get(slot, 0) < number, slots))
        return slots

    def _add(self, context: Context, slots: list[int]) -> None:
        if not slots:
            return
        first = self.claimed.increment(slots)
        context.chain += slots
        self._entries += len(slots)
        self._released_entries += (context.expected == inf) * len(slots)
        self._recount(context)
        if first:
            self._detach(context.namespace, first)

    # -- ends of claims -------------------------------------------------------------------------------------

    def _set_chain(self, context: Context, chain: list[int]) -> None:
        """Its chain is shorter now."""
        count = len(context.chain) - len(chain)
        context.chain = chain
        self._entries -= count
        self._released_entries -= (context.expected == inf) * count
        self._recount(context)

    def _recount(self, context: Context) -> None:
        unproved = 0 if context.expected in (inf, None) else max(0, len(context.chain) - context.credit)
        self._unproved += unproved - context.unproved
        context.unproved = unproved

    def _leave(self, context: Context, start: int = 0) -> None:
        """Its claim ends from this place on: the blocks return to the policy."""
        chain = context.chain
        if start < len(chain):
            self._add_leaving(context, chain[start:])
            self._set_chain(context, chain[:start])

    def _add_leaving(self, context: Context, slots: list[int]) -> None:
        if slots:
            self._leaving.append((context.namespace, slots, context.number))
            self._num_leaving += len(slots)

    def _end(self, context: Context) -> None:
        self._leave(context)
        self._renumber(context)
        self._expect(context, None)

    def _own(self, slots: list[int], number: int) -> list[int]:
        """Those of the slots that have not lost their block since a claim with this number was made."""
        lost = self._lost
        return [slot for slot in slots if lost.get(slot, 0) < number] if lost else slots

    def settle(self, count: int) -> bool:
        """Return up to so many slots of claims that have ended to the policy. False if there is none left."""
        leaving = self._leaving
        while leaving and count > 0:
            namespace, slots, number = leaving.popleft()
            if len(slots) > count:
                leaving.appendleft((namespace, slots[:-count], number))
                slots = slots[-count:]
            count -= len(slots)
            self._num_leaving -= len(slots)
            free = self.claimed.decrement(self._own(slots, number))
            if free:
                self._attach(namespace, free)
        return bool(leaving)

    def _demote(self) -> None:
        """Claims have half of the pool at most: those that are expected last return to the policy."""
        most = int(LARGEST_SHARE * self._num_slots)
        excess = len(self.claimed) - self._released_entries - self._num_leaving - most
        while excess > 0 and (context := self._last()) is not None:
            count = min(excess, len(context.chain))
            self._leave(context, len(context.chain) - count)
            excess -= count

    def _last(self) -> Context | None:
        """The context that is expected last, of those with blocks."""
        heap = self._latest
        while heap:
            if _is_current(heap[0]) and heap[0][2].chain:
                return heap[0][2]
            heappop(heap)
        return None

    def _pass_time(self) -> None:
        """Contexts become overdue."""
        heap, now = self._due, self.now
        for _ in range(_DUE_AT_ONCE):
            if not heap or heap[0][0] > now:
                return
            entry = heappop(heap)
            context = entry[2]
            if not _is_current(entry):
                continue
            context.overdue += 1
            if context.overdue <= MOST_OVERDUE:
                self._expect(context, now + max(now - context.ended_at, 1e-3))
                continue
            self.never_used += len(context.chain)
            self._fade(context, context.length)
            self._end(context)

    # -- eviction -------------------------------------------------------------------------------------------

    def go_first(self, idle: float | None) -> bool:
        """Whether a claimed block is evicted next. `idle`: of the policy's next one; None if it has none."""
        while self._released and not self._is_released(*self._released[0]):
            self._released.popleft()
        if self._released or idle is None:
            return True
        context = self._last()
        return context is not None and context.expected - self.now > self.regret.until_next_use(idle)

    @staticmethod
    def _is_released(context: Context, number: int) -> bool:
        return context.number == number and bool(context.chain)

    def take(self, count: int) -> tuple[Namespace | None, list[int]]:
        """Of the `count` claimed slots that go first, which lose that claim, those that have no other claim and that no
        other request has used; and their namespace. None without claims."""
        context = self._released[0][0] if self._released else self._last()
        if context is None:
            return None, []
        slots = context.chain[-count:]
        self._set_chain(context, context.chain[:-count])
        free = self.claimed.decrement(self._own(slots, context.number))
        used_at, ended_at = self._uses.times.used_times, context.ended_at
        if any(used_at[slot] > ended_at for slot in free):  # by another request
            self._attach(context.namespace, [slot for slot in free if used_at[slot] > ended_at])
            free = [slot for slot in free if used_at[slot] <= ended_at]
        self.never_used += len(free)
        return context.namespace, free

    def note_uses(self, keys: Sequence[bytes], now: float) -> None:
        """A request has used these blocks."""
        self.now = max(self.now, now)
        self.regret.note_uses(keys, now)

    # -- what happens to slots ------------------------------------------------------------------------------

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
            oldest = min([*numbers, *(number for *_, number in self._leaving)], default=self._number + 1)
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
                self._leave(context)
            self._latest, self._due = [], []
            self._released.clear()

    def expect(self, context: Context, resume_in: float | None, now: float) -> None:
        """Someone else says when the next request comes; None: none does."""
        self.now = max(self.now, now)
        context.is_hinted, context.overdue = True, 0
        self._expect(context, inf if resume_in is None else now + resume_in)
        if resume_in is None:
            self._spare_shared(context)

    # -- integrity ------------------------------------------------------------------------------------------

    def defects(self, visible: set[int]) -> list[str]:
        """Inconsistencies. O(contexts and their blocks): for integrity checks."""
        found: list[str] = []
        holders: Counter[int] = Counter()
        for context in self.contexts():
            holders.update(self._own(context.chain, context.number))
        for _, slots, number in self._leaving:
            holders.update(self._own(slots, number))
        if holders != {slot: self.claimed.count(slot) for slot in self.claimed.slots()}:
            found.append("the claimed slots are not those of contexts")
        if not self.claimed.slots() <= visible:
            found.append("a claimed slot is not visible")
        contexts = self.contexts()
        released = [context for context in contexts if context.expected == inf]
        sums = (
            (self._entries, sum(len(context.chain) for context in contexts)),
            (self._released_entries, sum(len(context.chain) for context in released)),
            (self._unproved, sum(context.unproved for context in contexts)),
            (self._num_leaving, sum(len(slots) for _, slots, _ in self._leaving)),
        )
        if any(count != total for count, total in sums):
            found.append(f"the counts of claims are wrong: {sums}")
        if self.is_on:
            listed = {(id(context), context.number) for _, number, context in self._latest if context.number == number}
            listed |= {(id(context), number) for context, number in self._released if context.number == number}
            if any(context.chain and (id(context), context.number) not in listed for context in contexts):
                found.append("a claim cannot be evicted")
        return found
