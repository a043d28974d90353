"""Claims: which blocks are expected to be used again, and when.

A client names the context of a request, and may say when its next one comes; the pool learns that otherwise. At the
request's end the context claims the blocks of its chain. A claimed block has its place by the earliest expected use of
its claims: the context that is expected last loses its blocks first, from the end of its chain, and a block that others
claim as well stays for them.

Claims and the policy share one scale, the time until the next use. A block that is idle has the more time to wait the
longer it is idle; how often idle blocks were used again says how much. That holds for what the policy would evict next,
for contexts that are overdue, and for those whose return nobody can foretell. Whichever block is expected last is
evicted: none is ever kept from eviction.

Clients may be wrong, or lie. A claim changes who is evicted first, but only within the time for which the policy would
have kept the blocks, too. To keep blocks longer takes trust: claims that have proved nothing share a twentieth of the
pool for that. Blocks that a context has claimed and has used again, and nobody else meanwhile, allow more, up to half
of the pool, and those that were kept for nothing allow less.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile
from math import exp, inf, log, log2
from operator import eq
from typing import NamedTuple

from kvstow.control.namespaces import Namespace
from kvstow.control.slots import RefCounts
from kvstow.control.uses import MOST_USES, Uses
from kvstow.hints import Hints
from kvstow.keys import GROUP_BYTES

MOST_CONTEXTS = 8192
"""That are known. The one is forgotten first that has brought the fewest blocks, so that names alone push nobody out;
see `Claims._weigh`."""
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
_STEADY_HINT, _STEADY_GAP = 1.0, 0.25
"""Up to which mean square of the logarithm of the true gap over the expected one that says when the next request comes,
if there was a hint, and if there was none. Otherwise a context has its place by the time for which it is idle."""
_GROSS_ERROR, _WRONG_SHARE = 1.5**2, 0.25
"""A hint is far from true if the logarithm of the true gap over it has a larger square. If more of them are, or more
releases are followed by a request, they are taken for names alone."""
_DUE_AT_ONCE = 32
_PART = 1024
"""Slots of a part of a chain, at most, unless `extend` is given more at once."""
_USED_ONCE_MORE = bytes((*range(1, MOST_USES + 1), 0))
"""By the uses of a block: those after one more; none is known where further uses are not counted."""


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


@dataclass(slots=True, eq=False)
class ClaimedPart:
    """Neighbours in a chain that a context claims, or did until its request that ended at `ended_at`. `uses`: how often
    each had been used then. Slots that were lost since the loss with this number are not its own. `is_steady`: see
    `Context`; set when the claim ends."""

    namespace: Namespace
    slots: list[int]
    uses: bytes
    number: int
    ended_at: float
    is_steady: bool = True

    def cut(self, length: int) -> ClaimedPart:
        """Has so many slots from now on. Returns the others."""
        end = replace(self, slots=self.slots[length:], uses=self.uses[length:])
        del self.slots[length:]
        self.uses = self.uses[:length]
        return end


@dataclass(slots=True, eq=False)
class Context:
    """What is known of a context. Changed by `Claims` alone.

    `chain`: what it claims, root first, `num_blocks` slots. `kept`: how many of them it keeps longer than the policy
    would, of which its `credit` does not cover the `unproved`. `expected`: when its next request is; `inf` if none is,
    None if nothing is known. `is_steady`: whether that can be foretold. `overdue`: how often that time has passed, and
    `step_at`: when it passes next. `brought`: blocks that it was the first to use, and those that it has used again.
    `renewal`: the one that is not finished. `hint`: the `resume_in` of its last request; `inf` for a release. The
    errors are mean squares of the logarithm of the true gap over the hint, and over what was learned. `name`: what the
    client calls it, for people.
    """

    namespace: Namespace
    context_id: bytes
    serial: int
    hint_error: float
    log_gap_error: float
    log_gap: float | None = None
    chain: list[ClaimedPart] = field(default_factory=list)
    num_blocks: int = 0
    requests: int = 0
    hits: int = 0
    overdue: int = 0
    kept: int = 0
    unproved: int = 0
    credit: int = 0
    brought: int = 0
    expected: float | None = None
    is_steady: bool = False
    step_at: float = inf
    ended_at: float = -inf
    renewal: Renewal | None = None
    hint: float | None = None
    name: str = ""


class Order:
    """Contexts by a number, each at most once. O(log contexts), and a move of 8 bytes for each behind it."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Context]] = []
        self._at: dict[Context, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, context: Context) -> bool:
        return context in self._at

    def __iter__(self) -> Iterator[Context]:
        return (context for *_, context in self._entries)

    def __reversed__(self) -> Iterator[Context]:
        return (context for *_, context in reversed(self._entries))

    @property
    def first(self) -> Context | None:
        return self._entries[0][2] if self._entries else None

    @property
    def last(self) -> Context | None:
        return self._entries[-1][2] if self._entries else None

    def at(self, context: Context) -> float:
        return self._at[context]

    def put(self, context: Context, number: float) -> None:
        if self._at.get(context) != number:
            self.discard(context)
            self._at[context] = number
            insort(self._entries, (number, context.serial, context))

    def discard(self, context: Context) -> None:
        number = self._at.pop(context, None)
        if number is not None:
            del self._entries[bisect_left(self._entries, (number, context.serial))]


@dataclass(slots=True, eq=False)
class Renewal:
    """A claim that is being made, slice by slice from the root.

    So many parts of the context's chain are right, with so many blocks: `filled`, `length`. `is_whole`: a block behind
    an absent one is useless. `kept`: what the context had kept. `again`: blocks from the root on that were claimed
    before and are still there; nobody but the context has used `proved` of them since.
    """

    context: Context
    kept: int
    is_whole: bool
    filled: int = 0
    length: int = 0
    again: int = 0
    proved: int = 0


class Claims:
    """The contexts of a pool, and what they claim. Used under the pool's lock; each call is O(slots given), and O(chain
    / 1024) where a claim ends.

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
        self._contexts: dict[tuple[int, bytes], Context] = {}
        self._serial = 0
        self._worth = Order()
        """All contexts, the one that is forgotten next first."""
        self._floor = 0.0
        """The number there of the last one that was forgotten."""
        self._lost_at = array("q")
        """By slot: the number of the last loss of its block while it was claimed."""
        self._losses = 0
        self._entries = self._unproved = 0
        self._expected, self._idle, self._due, self._kept = Order(), Order(), Order(), Order()
        """Contexts with blocks: by the time of their next request, and those for which there is none, or it has passed,
        by the end of their last request. Contexts by the time at which to see to them; and those that keep blocks
        longer than the policy would, by the time of their next request."""
        self._cold: deque[ClaimedPart] = deque()
        """What goes first."""
        self._aged: deque[ClaimedPart] = deque()
        """What may not be kept longer than the policy would, idle longest first: it goes when the policy's would."""
        self._leaving: deque[ClaimedPart] = deque()
        """What returns to the policy once `settle` comes to it."""
        self._overdue_returns = Returns()
        self._log_gap: float | None = None
        self._log_gap_error = 1.0
        self._hint_error = 0.0
        """Of all contexts, what each has."""
        self._gross, self._releases = Returns(0.0), Returns(0.0)
        """How often hints were far from true, and releases were followed by a request."""

    # -- contexts -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._contexts)

    def contexts(self) -> list[Context]:
        return list(self._contexts.values())

    def find(self, namespace: Namespace, context_id: bytes) -> Context | None:
        context = self._contexts.get((namespace.tag, context_id))
        if context is not None and context.namespace is not namespace:  # the number has gone to another namespace
            self._forget(context)
            return None
        return context

    def _find_or_add(self, namespace: Namespace, context_id: bytes) -> Context:
        context = self.find(namespace, context_id)
        if context is None:
            if len(self) >= MOST_CONTEXTS:
                least = self._worth.first
                assert least is not None
                self._floor = self._worth.at(least)
                self._forget(least)
            self._serial += 1
            context = Context(namespace, context_id, self._serial, self._hint_error, self._log_gap_error)
            self._contexts[(namespace.tag, context_id)] = context
            self._weigh(context)
        return context

    def _forget(self, context: Context) -> None:
        self.leave(context)
        context.renewal = None
        self._due.discard(context)
        self._worth.discard(context)
        del self._contexts[(context.namespace.tag, context.context_id)]

    def _weigh(self, context: Context) -> None:
        """The context was used. Inventing a name costs a client nothing, so the context that has brought the fewest
        blocks is forgotten first, and of several with as many the one that was used longest ago (GreedyDual)."""
        self._worth.put(context, self._floor + context.brought)

    # -- claiming -------------------------------------------------------------------------------------------

    def begin(self, namespace: Namespace, hints: Hints, keys: Sequence[bytes], now: float) -> Renewal:
        """A request with hints has ended. `keys`: its chain, without repeats. `extend` then claims its blocks, and
        `finish` follows."""
        assert hints.context is not None
        self._pass_time(now)
        context = self._find_or_add(namespace, hints.context)
        if context.renewal is not None:
            self._account(context.renewal)
        if context.requests:
            self._learn(context, now)
        is_whole = not keys or keys[0][:GROUP_BYTES] == keys[-1][:GROUP_BYTES]
        renewal = context.renewal = Renewal(context, context.kept, is_whole)
        self._keep(context, 0)
        context.ended_at, context.overdue = now, 0
        context.requests += 1
        context.name = hints.name
        context.hint = inf if hints.release else hints.resume_in
        seconds, error = self._foretell(context)
        steady = _STEADY_HINT if context.hint is not None else _STEADY_GAP
        self._expect(context, None if seconds is None else now + seconds, is_steady=error < steady)
        return renewal

    def _learn(self, context: Context, now: float) -> None:
        """Take what the context's return says of its hint and its gaps."""
        gap = log(max(now - context.ended_at, 1e-3))
        hint, learned = context.hint, context.log_gap
        if context.overdue:
            self._overdue_returns.count(used=context.overdue <= MOST_OVERDUE)
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
        self._log_gap_error += ((gap - learned) ** 2 - self._log_gap_error) * _LEARNING_OF_ALL
        self._log_gap = usual + (gap - usual) * _LEARNING_OF_ALL

    def _foretell(self, context: Context) -> tuple[float | None, float]:
        """In how many seconds its next request comes, and the mean square of the logarithm's error. A hint counts for
        as much as earlier ones were right."""
        learned = context.log_gap if context.log_gap is not None else self._log_gap
        hint, error, hint_error = context.hint, context.log_gap_error, context.hint_error
        if hint == inf:
            if self._releases.share < _WRONG_SHARE:
                self._releases.count(used=False)
                return inf, 0.0
        elif hint is not None and self._gross.share < _WRONG_SHARE:
            if learned is None:
                return hint, hint_error
            weight = (error + 1e-9) / (error + hint_error + 1e-9)
            return exp(weight * log(max(hint, 1e-3)) + (1.0 - weight) * learned), weight * hint_error
        return (None if learned is None else exp(learned)), error

    def _expect(self, context: Context, expected: float | None, *, is_steady: bool) -> None:
        """Its claim has this place from now on."""
        context.expected, context.is_steady = expected, is_steady
        context.step_at = inf if expected is None else expected
        self._place(context)
        self._see_later(context)

    def _place(self, context: Context) -> None:
        """Its blocks can be evicted."""
        self._expected.discard(context)
        self._idle.discard(context)
        if context.num_blocks:
            if context.expected is None or context.overdue or not context.is_steady:
                self._idle.put(context, context.ended_at)
            else:
                self._expected.put(context, context.expected)

    def _see_later(self, context: Context) -> None:
        at = context.step_at
        if context.num_blocks and not context.kept:
            at = min(at, context.ended_at + self.policy_age)
        if at < inf:
            self._due.put(context, at)
        else:
            self._due.discard(context)

    def extend(self, renewal: Renewal, slots: Sequence[int | None]) -> bool:
        """Claim the next blocks of the chain, which are in these slots; None for absent ones. Returns whether to go
        on behind them."""
        context = renewal.context
        if context.renewal is not renewal or not self.is_on or context.num_blocks < renewal.length:
            return False
        self.settle(2 * len(slots))
        present = [slot for slot in slots if slot is not None]
        goes_on = len(present) == len(slots) or not renewal.is_whole
        if not goes_on:
            present = list(slots[: slots.index(None)])  # type: ignore[arg-type]
        fresh = self._go_over(renewal, present)
        if not fresh:
            return goes_on
        self.leave(context, renewal.length)
        granted = fresh[: max(0, _MOST_ENTRIES * self._num_slots - self._entries)]
        self._add(renewal, granted)
        return goes_on and len(granted) == len(fresh)

    def _go_over(self, renewal: Renewal, slots: list[int]) -> list[int]:
        """Go over the parts of the chain that are these slots. Returns the slots behind them."""
        context = renewal.context
        while slots and renewal.filled < len(context.chain):
            part = context.chain[renewal.filled]
            same = self._same(part, slots)
            uses = self._uses.counts(slots[:same])
            renewal.again += same
            renewal.proved += sum(map(eq, part.uses.translate(_USED_ONCE_MORE), uses))
            renewal.length += same
            if same == len(slots) < len(part.slots):  # the next slice goes on within the part
                context.chain.insert(renewal.filled + 1, part.cut(same))
            elif same < len(part.slots):
                self.leave(context, renewal.length)
            if same:
                part.uses, part.number, part.ended_at = uses, self._losses, context.ended_at
                renewal.filled += 1
            slots = slots[same:]
        return slots

    def _same(self, part: ClaimedPart, slots: list[int]) -> int:
        """How many leading slots of the part these are, and are still its own."""
        own, lost_at = part.slots, self._lost_at
        if part.number < self._losses:
            own = list(takewhile(lambda slot: lost_at[slot] <= part.number, own))
        if own == slots[: len(own)]:
            return len(own)
        pairs = zip(own, slots, strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(own), len(slots)))

    def _add(self, renewal: Renewal, slots: list[int]) -> None:
        if not slots:
            return
        context, uses = renewal.context, self._uses.counts(slots)
        part = context.chain[-1] if context.chain else None
        if part is not None and part.number == self._losses and len(part.slots) + len(slots) <= _PART:
            part.slots += slots
            part.uses += uses
        else:
            context.chain.append(ClaimedPart(context.namespace, slots, uses, self._losses, context.ended_at))
            renewal.filled += 1
        context.brought += uses.count(1)
        renewal.length += len(slots)
        context.num_blocks += len(slots)
        self._entries += len(slots)
        if context.num_blocks == len(slots):  # also if an eviction has taken all meanwhile
            self._place(context)
            self._see_later(context)
        first = self.claimed.increment(slots)
        if first:
            self._detach(context.namespace, first)

    def finish(self, renewal: Renewal) -> None:
        """All of the chain was given to `extend`, or as much as it wanted."""
        context = renewal.context
        if context.renewal is not renewal:
            return
        self.leave(context, renewal.length)
        self._account(renewal)
        if context.expected == inf:
            self._release(context)

    def _account(self, renewal: Renewal) -> None:
        """Take what was used again as proof, and what was not as waste. Blocks that others have used as well prove
        nothing: the policy may have kept those for them."""
        context, kept, again, proved = renewal.context, renewal.kept, renewal.again, renewal.proved
        context.renewal = None
        context.hits += again
        context.brought = 0 if context.expected == inf else context.brought + proved
        self._weigh(context)
        self.used_again += min(kept, again)
        context.credit = min(context.credit + proved, 2 * again)
        self.credit = min(self.credit + proved, (LARGEST_SHARE - UNPROVED_SHARE) * self._num_slots)
        if kept > again:
            self._fade(context, kept - again)

    def _fade(self, context: Context, count: int) -> None:
        """So many blocks were kept for nothing."""
        self.never_used += count
        context.credit = max(0, context.credit - count)
        self.credit = max(0.0, self.credit - count)

    def _release(self, context: Context) -> None:
        """None of its blocks is expected to be used again. Those become cold that no other request has used, the end of
        the chain: from where on blocks have no more uses than the context has had requests."""
        most = min(context.requests, MOST_USES - 1)
        while context.chain:
            part = context.chain[-1]
            used = bisect_left(part.uses, True, key=lambda uses: uses <= most)
            if used < len(part.slots):
                self._cold += self._cut(context, context.num_blocks - len(part.slots) + used)
            if used:
                break
        self.leave(context)

    # -- ends of claims -------------------------------------------------------------------------------------

    def _cut(self, context: Context, length: int) -> list[ClaimedPart]:
        """Its chain is so long from now on. Returns what was cut off, the end of the chain first."""
        parts: list[ClaimedPart] = []
        while (excess := context.num_blocks - length) > 0:
            part = context.chain[-1]
            if len(part.slots) > excess:
                part = part.cut(len(part.slots) - excess)
            else:
                context.chain.pop()
            context.num_blocks -= len(part.slots)
            parts.append(part)
        if context.kept > length:
            self._fade(context, context.kept - length)
            self._keep(context, length)
        if parts and not length:
            self._place(context)
        return parts

    def _keep(self, context: Context, count: int) -> None:
        """It keeps so many blocks longer than the policy would."""
        unproved = max(0, count - context.credit)
        self.kept += count - context.kept
        self._unproved += unproved - context.unproved
        context.kept, context.unproved = count, unproved
        if count:
            self._kept.put(context, _time_of(context))
        else:
            self._kept.discard(context)

    def leave(self, context: Context, length: int = 0) -> None:
        """Its chain is so long from now on: the blocks behind return to the policy."""
        self._leaving += self._cut(context, length)

    def _own(self, part: ClaimedPart) -> list[int]:
        """The slots of the part that have not lost their block since they were claimed."""
        if part.number == self._losses:
            return part.slots
        lost_at = self._lost_at
        return [slot for slot in part.slots if lost_at[slot] <= part.number]

    def _take_from(self, parts: deque[ClaimedPart], count: int) -> ClaimedPart:
        """Up to so many slots of the first part, from its end."""
        part = parts[0]
        part = parts.popleft() if len(part.slots) <= count else part.cut(len(part.slots) - count)
        self._entries -= len(part.slots)
        return part

    @property
    def is_leaving(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._leaving) or (not self.is_on and bool(self._listed() or self._cold or self._aged))

    def _listed(self) -> Context | None:
        return self._expected.last or self._idle.first

    def settle(self, count: int) -> None:
        """Return up to so many slots of claims that have ended to the policy."""
        while count > 0:
            if not self._leaving and not self.is_on:
                self._leave_one()
            if not self._leaving:
                return
            part = self._take_from(self._leaving, count)
            count -= len(part.slots)
            free = self.claimed.decrement(self._own(part))
            if free:
                self._attach(part.namespace, free)

    def _leave_one(self) -> None:
        """Hints are off: the next claim ends."""
        if context := self._listed():
            self.leave(context)
        elif parts := self._cold or self._aged:
            self._leaving.append(parts.popleft())

    # -- time -----------------------------------------------------------------------------------------------

    def _pass_time(self, now: float) -> None:
        """See to some contexts that become overdue, or are kept longer than the policy would."""
        self.now = max(self.now, now)
        for _ in range(_DUE_AT_ONCE):
            context = self._due.first
            if context is None or self._due.at(context) > self.now:
                return
            self._see_to(context)

    def _see_to(self, context: Context) -> None:
        now, idle = self.now, self.now - context.ended_at
        if context.num_blocks and not context.kept and idle >= self.policy_age:
            count = 0
            if context.overdue <= MOST_OVERDUE:
                room = self._make_room(context)
                if room is None:
                    return
                count = room
            self._age(context, count)
            self._keep(context, count)
        if now >= context.step_at:
            if context.overdue:
                self._overdue_returns.count(used=False)
            context.overdue += 1
            context.step_at = now + max(idle, 1e-3)
            if context.overdue == 1:
                self._place(context)
            elif context.overdue > MOST_OVERDUE:
                if context.kept:
                    self._cold += self._cut(context, 0)
                context.step_at = inf  # what is left goes when the policy would evict it
        self._see_later(context)

    def _make_room(self, context: Context) -> int | None:
        """How many blocks it may keep. Contexts that are expected later keep nothing any more if it would keep more,
        but those whose own credit covers them only if its own credit does. None: one of them has made room, and
        more may have to; they are thousands at worst, so the context stays due."""
        shared = max(0, self.allowed - self._unproved)
        left = max(0, int(LARGEST_SHARE * self._num_slots) - self.kept)
        count = min(context.num_blocks, context.credit + shared, left)
        last = self._kept.last
        if count == context.num_blocks or last is None or self._kept.at(last) <= _time_of(context):
            return count
        if not last.unproved and context.credit < context.num_blocks:
            return count
        self._keep(last, 0)
        self._age(last, 0)
        return None

    def _age(self, context: Context, length: int) -> None:
        """What is behind so many blocks goes when the policy would evict it."""
        parts = self._cut(context, length)
        for part in parts:
            part.is_steady = context.is_steady
        self._aged += parts

    # -- eviction -------------------------------------------------------------------------------------------

    def _next(self) -> tuple[float, Context | None]:
        """How long to wait for the next use of the claimed block that goes first, and whose it is; None: what has
        aged."""
        wait, found = -inf, None
        if self._aged:
            wait = self._until_next_use(self._aged[0].ended_at, self._aged[0].is_steady)
        if (idle := self._idle.first) is not None:
            other = self._until_next_use(idle.ended_at, False)
            if other > wait:
                wait, found = other, idle
        if (last := self._expected.last) is not None:
            other = self._expected.at(last) - self.now
            if other > wait:
                wait, found = other, last
        return wait, found

    def _until_next_use(self, ended_at: float, like_policy: bool) -> float:
        """Of a context without an expected time. Those that clients have made up never return, but no context waits
        longer for that than the policy's blocks do."""
        idle = self.now - ended_at
        wait = self.evicted.returns.until_next_use(idle)
        return wait if like_policy else min(wait, self._overdue_returns.until_next_use(idle))

    def go_first(self, idle: float | None) -> bool:
        """Whether a claimed block is evicted next. `idle`: of the policy's next one; None if it has none."""
        if self._cold or idle is None or (self._aged and self.now - self._aged[0].ended_at >= idle):
            return True
        return self._next()[0] > self.evicted.returns.until_next_use(idle)

    def take(self, count: int) -> tuple[Namespace | None, list[int]]:
        """Of up to `count` claimed slots that go first, which lose that claim, those that have no other claim and that
        no other request has used; and their namespace. None without claims."""
        context = None if self._cold else self._next()[1]
        if context is not None:
            (part,) = self._cut(context, context.num_blocks - min(count, len(context.chain[-1].slots)))
            self._entries -= len(part.slots)
        elif parts := self._cold or self._aged:
            part = self._take_from(parts, count)
        else:
            return None, []
        free = self.claimed.decrement(self._own(part))
        used_at, ended_at = self._uses.times.used_times, part.ended_at
        used = [slot for slot in free if used_at[slot] > ended_at]  # by another request
        if used:
            self._attach(part.namespace, used)
            free = [slot for slot in free if used_at[slot] <= ended_at]
        return part.namespace, free

    def blocks_of(self, part: ClaimedPart, *, alone: bool) -> list[int]:
        """The slots of a part of a context's chain. `alone`: those that no other context claims and no other request
        has used."""
        slots = self._own(part)
        if alone:
            used_at, claimed = self._uses.times.used_times, self.claimed
            slots = [slot for slot in slots if claimed.count(slot) == 1 and used_at[slot] <= part.ended_at]
        return slots

    def next_slots(self, count: int) -> list[int]:
        """The claimed slots among the next `count` places of chains, about in the order of eviction."""
        contexts = chain(reversed(self._expected), self._idle)
        parts = chain(
            self._cold, self._leaving, self._aged, chain.from_iterable(reversed(one.chain) for one in contexts)
        )
        places = chain.from_iterable(reversed(self._own(part)) for part in parts)
        return list(dict.fromkeys(islice(places, count)))  # several contexts may claim one

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
        self._losses += bool(claimed)
        for slot in claimed:
            self._lost_at[slot] = self._losses

    def set_num_slots(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.claimed.grow(num_slots)
        self._lost_at.frombytes(bytes(self._lost_at.itemsize * max(0, num_slots - len(self._lost_at))))
        self.credit = min(self.credit, (LARGEST_SHARE - UNPROVED_SHARE) * num_slots)

    def tick(self, now: float, count: int) -> None:
        """Time has passed. About once a second; O(count)."""
        self._pass_time(now)
        self.settle(count)

    # -- steering -------------------------------------------------------------------------------------------

    def set_on(self, is_on: bool) -> None:
        """Use hints, or claim nothing: then contexts are only learned of, and `settle` ends their claims."""
        self.is_on = is_on

    def expect(self, context: Context, resume_in: float | None, now: float) -> None:
        """An operator says when the next request comes; None: none does."""
        self._pass_time(now)
        self._keep(context, 0)
        context.overdue, context.hint = 0, None
        self._expect(context, inf if resume_in is None else now + resume_in, is_steady=True)
        if resume_in is None:
            self._release(context)

    # -- integrity ------------------------------------------------------------------------------------------

    def defects(self, visible: set[int]) -> list[str]:
        """Inconsistencies. O(contexts and their blocks): for integrity checks."""
        found: list[str] = []
        contexts = self.contexts()
        parts = [*self._leaving, *self._cold, *self._aged, *chain.from_iterable(one.chain for one in contexts)]
        holders: Counter[int] = Counter()
        for part in parts:
            holders.update(self._own(part))
        if holders != {slot: self.claimed.count(slot) for slot in self.claimed.slots()}:
            found.append("the claimed slots are not those of contexts")
        if not self.claimed.slots() <= visible:
            found.append("a claimed slot is not visible")
        sums = (
            (self._entries, sum(len(part.slots) for part in parts)),
            (self._entries, sum(len(part.uses) for part in parts)),
            (self.kept, sum(context.kept for context in contexts)),
            (self._unproved, sum(context.unproved for context in contexts)),
            (len(self._contexts), len(self._worth)),
            *((one.num_blocks, sum(len(part.slots) for part in one.chain)) for one in contexts),
        )
        if any(count != total for count, total in sums):
            found.append(f"the counts of claims are wrong: {[pair for pair in sums if pair[0] != pair[1]]}")
        if any((one in self._expected) + (one in self._idle) != bool(one.num_blocks) for one in contexts):
            found.append("a claim cannot be evicted, or one without blocks is to be")
        return found


def _time_of(context: Context) -> float:
    """When its next request is; `inf` if nobody can foretell it."""
    if context.expected is None or context.overdue or not context.is_steady:
        return inf
    return context.expected
