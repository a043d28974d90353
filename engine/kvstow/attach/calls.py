"""What the halves of an engine and the node service send each other after the hello.

Slots are the pool's. Blocks are the engine's own and stay with it: pair `i` of an op is the engine's block `i`. The
blocks of its namespace that were stored or removed are events, which it reads page by page.

A rank's memory is a list of extents. An extent is a sealed memfd that holds the slots from `first_slot` on, back to
back at the pool's slot stride. The service publishes how far each extent is populated. The worker maps no further, and
reports how many slots it has registered. It starts no copy in a revoked extent, and reports when it has nothing of the
extent mapped any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from kvstow.attach.wire import (
    MOST_COMPLETIONS,
    MOST_ERROR,
    MOST_LISTED,
    U32,
    U64,
    Counts,
    Digest,
    Keys,
    Kind,
    Message,
    Packed,
    PackedPart,
    Runs,
    Seconds,
    StoredKeys,
    Text,
    U32s,
    U64s,
    decoded,
)
from kvstow.endings import Status
from kvstow.hints import CONTEXT_BYTES, LONGEST_PAUSE, MOST_NAME_CHARS, Hints
from kvstow.messages import Completion, DesiredState, Direction, Mark, RankReport
from kvstow.plaintext import is_plain, plain
from kvstow.prefill import PrefillCost, PrefillNews
from kvstow.stats import HINTS_IGNORED, LOAD_CHOICES

_T = TypeVar("_T")


class Hold(IntEnum):
    """What a lookup protects from eviction."""

    NOTHING = 0
    PRESENT = 1
    """All keys that are present."""
    LEADING = 2
    """The keys up to the first absent one. The answer holds no other run."""
    ALL = 3
    """All keys, or nothing if one of them is absent."""


class Lookup(Packed, frozen=True):
    """Which of `keys` are present. `counted`: it counts as a lookup of a request."""

    KIND: ClassVar = Kind.LOOKUP
    keys: Keys
    hold: Hold = Hold.LEADING
    counted: bool = True


class LookupPrompt(Packed, frozen=True):
    """Which of `keys` are present. `keys` are those of all blocks of a prompt, one KV group after the other. Holds
    nothing. The service may fetch the missing keys that a hit needs from the fleet tier before it answers."""

    KIND: ClassVar = Kind.LOOKUP_PROMPT
    keys: Keys


class Found(Packed, frozen=True):
    """Runs of present keys, as (index of the first key, length). `lease_id` is 0 if nothing is held. `fetched`:
    the runs of those keys that came while the lookup waited for the fleet tier.

    A lease holds the keys of all runs, in order. `BeginLoad.first` is an index into them.
    """

    KIND: ClassVar = Kind.FOUND
    lease_id: U64
    runs: Runs
    fetched: Runs = ()

    @property
    def leading(self) -> int:
        """How many keys are present, counted from the first key."""
        return self.runs[0][1] if self.runs and self.runs[0][0] == 0 else 0


class Pending(Packed, frozen=True):
    """The answer to a lookup takes time: the fleet tier may have more blocks, or the ranks are still registering the
    memory. The answer comes later, under the same request id. Answers to other calls may come before it."""

    KIND: ClassVar = Kind.PENDING


class Prefill(Packed, frozen=True):
    """What computing prompts costs the engine, and what its loads have saved: see `PrefillNews`. No answer."""

    KIND: ClassVar = Kind.PREFILL
    cost: tuple[Seconds, Seconds, Annotated[float, Meta(ge=0, lt=1 << 32)]]
    hit_tokens: U32 = 0
    hit_seconds: Seconds = 0.0
    waited: Seconds = 0.0
    not_made: U32 = 0

    @classmethod
    def of(cls, news: PrefillNews) -> Prefill:
        return cls(news.cost, *news[1:])

    def news(self) -> PrefillNews:
        return PrefillNews(PrefillCost(*self.cost), self.hit_tokens, self.hit_seconds, self.waited, self.not_made)


class Release(Packed, frozen=True):
    """End leases. No answer; a lease that has ended is ignored."""

    KIND: ClassVar = Kind.RELEASE
    lease_ids: U64s


class BeginLoad(Packed, frozen=True):
    """Load `count` slots of a lease, starting at its slot `first`. This uses up the lease. `choice`: one of
    `LOAD_CHOICES`, which is counted."""

    KIND: ClassVar = Kind.BEGIN_LOAD
    lease_id: U64
    first: U32
    count: U32
    request_id: Text = ""
    choice: Text = "async_engine"

    def check(self) -> None:
        if self.choice not in LOAD_CHOICES:
            raise ValueError(f"the choice is {self.choice}; allowed: {', '.join(LOAD_CHOICES)}")
        super().check()


class LoadBegun(Packed, frozen=True):
    """The op of a load, and the slots to read."""

    KIND: ClassVar = Kind.LOAD_BEGUN
    op_id: U64
    slots: U32s


class BeginStore(Packed, frozen=True):
    """Store blocks under `keys`."""

    KIND: ClassVar = Kind.BEGIN_STORE
    MOST_BYTES: ClassVar = 96 << 10
    keys: StoredKeys
    request_id: Text = ""


class StoreBegun(Packed, frozen=True):
    """The op of a store. Block `accepted[i]`, an index into the requested keys, goes to `slots[i]`. `op_id` is 0 if
    there is nothing to store. `outcomes` and `unplaced` are those of `StoreGrant`. `room` is the number of blocks that
    the next store would find a slot for. `incomplete`: numbers of running requests of the session that lack blocks from
    now on, because their slots were lent to others or their store was deferred: it is worth offering their chains when
    they end."""

    KIND: ClassVar = Kind.STORE_BEGUN
    op_id: U64
    accepted: U32s
    slots: U32s
    unplaced: U32s = ()
    outcomes: Counts = msgspec.field(default_factory=dict)
    room: U64 = 0
    incomplete: U64s = ()

    def check(self) -> None:
        if len(self.accepted) != len(self.slots):
            raise ValueError(f"{len(self.accepted)} blocks and {len(self.slots)} slots")


_TOO_LONG = 1e9


class Completions(Packed, frozen=True):
    """What `rank` reports about its ops, in order. No answer: see `SettledOps`."""

    KIND: ClassVar = Kind.COMPLETIONS
    MOST_BYTES: ClassVar = 1 << 20
    rank: U32
    boot_id: Text
    completions: Annotated[tuple[Completion, ...], Meta(max_length=MOST_COMPLETIONS)]

    @classmethod
    def listed(cls, rank: int, boot_id: str, completions: Sequence[Completion]) -> Iterator[Self]:
        """These completions in as many messages as they need. Errors are cut, and become plain text."""
        clean = [replace(done, error=plain(done.error, MOST_ERROR)) if done.error else done for done in completions]
        for start in range(0, len(clean), MOST_COMPLETIONS):
            yield cls(rank, boot_id, tuple(clean[start : start + MOST_COMPLETIONS]))

    def check(self) -> None:
        # The type is the data plane's, which needs no msgspec.
        for done in self.completions:
            seconds, queued = done.seconds, done.queue_seconds
            if done.error and not is_plain(done.error, MOST_ERROR):
                raise ValueError(f"op {done.op_id} has failed by {done.error[:100]!a}; allowed: one line of plain text")
            if done.op_id < 0 or done.num_bytes < 0 or not (0 <= seconds < _TOO_LONG and 0 <= queued < _TOO_LONG):
                raise ValueError(f"op {done.op_id} has moved {done.num_bytes} bytes in {seconds} and {queued} seconds")


class SettledOp(PackedPart, frozen=True):
    """A final result of an op of this session: see `kvstow.control.ops.Settled`."""

    op_id: U64
    direction: Direction
    mark: Mark
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error:
            force_setattr(self, "error", plain(self.error))


class SettledOps(Packed, frozen=True):
    """Results that became final, in order. Sent unasked. `room` and `incomplete` as in `StoreBegun`."""

    KIND: ClassVar = Kind.SETTLED
    ops: tuple[SettledOp, ...]
    room: U64 = 0
    incomplete: U64s = ()


class Admit(Packed, frozen=True):
    """The request with this number, which the engine has chosen, begins to compute; see `Session.admit`. `source`: see
    `Source`. No answer."""

    KIND: ClassVar = Kind.ADMIT
    number: U64
    keys: Keys
    looked_up: tuple[U32, U32]
    hints: Hints | None = None
    source: tuple[Digest, Digest, Digest] = (b"", b"", b"")

    def check(self) -> None:
        first, stop = self.looked_up
        if stop < first:
            raise ValueError(f"it has looked up blocks from {first} to {stop}")
        if self.hints is not None:
            _check_hints(self.hints)


class End(Packed, frozen=True):
    """The request with this number has ended; see `Session.end_request`, also for `more` and `others`, and `Ending` for
    `status` and `tokens`. No answer."""

    KIND: ClassVar = Kind.END
    number: U64
    status: Status = "other"
    tokens: tuple[U64, U64] | None = None
    more: Keys = ()
    others: Keys = ()


def _check_hints(hints: Hints) -> None:
    """The type is the control plane's, which needs no msgspec."""
    context, resume_in = hints.context, hints.resume_in
    if context is not None and len(context) != CONTEXT_BYTES:
        raise ValueError(f"the id of a context has {len(context)} bytes; allowed: {CONTEXT_BYTES}")
    if resume_in is not None and not 0 <= resume_in <= LONGEST_PAUSE:
        raise ValueError(f"a request is to resume in {resume_in} seconds; allowed: 0 to {LONGEST_PAUSE:.0f}")
    if not is_plain(hints.name, MOST_NAME_CHARS):
        raise ValueError(f"a context is named {hints.name[:100]!a}; allowed: {MOST_NAME_CHARS} printable characters")
    if len(hints.ignored) > len(HINTS_IGNORED) or not set(hints.ignored) <= set(HINTS_IGNORED):
        raise ValueError(f"hints were ignored for {ascii(hints.ignored)[:100]}; allowed: {', '.join(HINTS_IGNORED)}")


class CountLookup(Packed, frozen=True):
    """Count one lookup of `queried` blocks that found `hits`. `source`: see `Source`. No answer."""

    KIND: ClassVar = Kind.COUNT_LOOKUP
    queried: U32
    hits: U32
    source: tuple[Digest, Digest, Digest] = (b"", b"", b"")

    def check(self) -> None:
        if self.hits > self.queried:
            raise ValueError(f"{self.hits} hits of {self.queried} blocks")


class Reset(Packed, frozen=True):
    """Move this session to a fresh epoch. Nothing that other sessions use is removed."""

    KIND: ClassVar = Kind.RESET


class ResetDone(Packed, frozen=True):
    """The session's namespace after a reset."""

    KIND: ClassVar = Kind.RESET_DONE
    namespace: Text


class BlockChange(NamedTuple):
    """Blocks that can be found from now on, or no longer."""

    kind: Literal["stored", "removed"]
    keys: Keys


class ReadEvents(Packed, frozen=True):
    """Ask what has happened after this cursor. 0 starts at the oldest event that the service keeps."""

    KIND: ClassVar = Kind.READ_EVENTS
    after: U64


class EventPage(Packed, frozen=True):
    """What has happened to the blocks of the session's namespace, in order. `cursor` is the position after the last
    event that was read. `lost`: earlier events were dropped. `has_more`: another page can be read at once."""

    KIND: ClassVar = Kind.EVENTS
    cursor: U64
    changes: tuple[BlockChange, ...]
    lost: bool = False
    has_more: bool = False


class ExtentGrant(NamedTuple):
    """A piece of a rank's memory. `number` is its position among the rank's extents, the same on all ranks of a
    pool."""

    extent_id: U64
    number: U32
    first_slot: U32
    num_slots: U32
    num_bytes: U64
    populated_bytes: U64


class ExtentBytes(NamedTuple):
    """The first `num_bytes` of an extent."""

    extent_id: U64
    num_bytes: U64


class ExtentSlots(NamedTuple):
    extent_id: U64
    num_slots: U32


class GrantedExtents(Packed, frozen=True):
    """Extents that the rank may map from now on. The frame has one descriptor per extent, in the same order.

    With `is_all`, the worker now has everything that there is for it. What it still has mapped from an earlier session
    and was not granted in this one is of no use, and it releases it. The service sends that in each session, also if it
    has no extents for the worker.
    """

    KIND: ClassVar = Kind.EXTENTS
    slot_stride: U64
    extents: Annotated[tuple[ExtentGrant, ...], Meta(max_length=MOST_LISTED)]
    is_all: bool

    def check(self) -> None:
        for extent in self.extents:
            if max(extent.num_slots * self.slot_stride, extent.populated_bytes) > extent.num_bytes:
                raise ValueError(f"extent {extent.extent_id} is shorter than its slots or its populated bytes")


class RegisteredExtents(Packed, frozen=True):
    """How many slots of each extent, counted from its first slot, the worker can copy to and from."""

    KIND: ClassVar = Kind.REGISTERED
    extents: Annotated[tuple[ExtentSlots, ...], Meta(max_length=MOST_LISTED)]


class PopulatedExtents(Packed, frozen=True):
    """How many bytes of each extent, counted from its start, are populated. The numbers only grow."""

    KIND: ClassVar = Kind.POPULATED
    extents: tuple[ExtentBytes, ...]


class RevokedExtents(Packed, frozen=True):
    """Extents to unregister and unmap as soon as no copy uses them. Answered with `ReleasedExtents`. `at_end`: the
    service ends, and the extents may have slots of loads that it has agreed to. Otherwise they have none."""

    KIND: ClassVar = Kind.REVOKED
    extent_ids: U64s
    at_end: bool = False


class ReleasedExtents(Packed, frozen=True):
    """Extents that this process no longer has mapped, registered or open."""

    KIND: ClassVar = Kind.RELEASED
    extent_ids: U64s


class Report(Message, frozen=True):
    """A rank's report. The answer is its desired state."""

    KIND: ClassVar = Kind.REPORT
    report: RankReport

    def pack(self) -> bytes:
        return _dump(self.report.to_json())

    @classmethod
    def _unpack_whole(cls, payload: bytes) -> Self:
        return cls(decoded(lambda data: RankReport.from_json(msgspec.json.decode(data)), payload, "report"))


class Desired(Message, frozen=True):
    """A rank's desired state: the answer to its report. Also sent unasked when it changes."""

    KIND: ClassVar = Kind.DESIRED
    desired: DesiredState

    def pack(self) -> bytes:
        return _dump(self.desired.to_json())

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        return cls(decoded(lambda data: DesiredState.from_json(msgspec.json.decode(data)), payload, "desired state"))


class Detach(Packed, frozen=True):
    """This process leaves. It has nothing of the pool mapped, and no copy under way. No answer."""

    KIND: ClassVar = Kind.DETACH
    reason: Text = ""


def listed(rows: Sequence[_T]) -> Iterator[tuple[_T, ...]]:
    """The rows in pieces that a message may have."""
    for start in range(0, len(rows), MOST_LISTED):
        yield tuple(rows[start : start + MOST_LISTED])


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
