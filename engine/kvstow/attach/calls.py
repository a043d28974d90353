"""The messages between the halves of an engine and the node service, after the hello.

The service numbers slots, and the engine numbers blocks. Block numbers are never sent: slot `i` of an op belongs to the
engine's block `i`. The engine reads page by page which blocks of its namespace were stored or removed.

A rank's memory is a list of extents. An extent is a sealed memfd that holds the slots from `first_slot` on, back to
back at the pool's slot stride. The service publishes how far each extent is populated. The worker maps no further, and
reports how many slots it has registered. It starts no copy in a revoked extent, and reports when it has nothing of the
extent mapped any more.
"""

from __future__ import annotations

import time
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
    MOST_STORED,
    U32,
    U64,
    Counts,
    Digest,
    Keys,
    Kind,
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
from kvstow.descriptions import MOST_BYTES as MOST_DESCRIPTION
from kvstow.descriptions import TOKEN_BYTES, BlockDescription, DescribedBlocks
from kvstow.endings import Status
from kvstow.errors import ProtocolError
from kvstow.hints import CONTEXT_BYTES, LONGEST_PAUSE, MOST_NAME_CHARS, Hints
from kvstow.messages import Completion, DesiredState, Direction, Mark, RankReport
from kvstow.plaintext import MOST_TEXT, is_plain, plain
from kvstow.prefill import PrefillCost, PrefillNews
from kvstow.stats import HINTS_IGNORED, LOAD_CHOICES

_T = TypeVar("_T")


class Hold(IntEnum):
    """Which keys a lookup protects from eviction."""

    NOTHING = 0
    PRESENT = 1
    """The lookup holds all keys that are present."""
    LEADING = 2
    """The lookup holds the keys before the first absent one. Its answer has no other run."""
    ALL = 3
    """The lookup holds all keys, or nothing if one of them is absent."""


class Lookup(Packed, frozen=True):
    """Ask which of `keys` are present. With `counted`, it counts as a lookup of a request."""

    KIND: ClassVar = Kind.LOOKUP
    keys: Keys
    hold: Hold = Hold.LEADING
    counted: bool = True


class LookupPrompt(Packed, frozen=True):
    """Ask which of `keys` are present, and hold nothing. They are the keys of all blocks of a prompt, one KV group
    after the other. Before it answers, the service may fetch missing keys that a hit needs from the fleet tier."""

    KIND: ClassVar = Kind.LOOKUP_PROMPT
    keys: Keys


class Found(Packed, frozen=True):
    """The answer to a lookup: the runs of present keys, as pairs of the index of the first key and the length.

    `lease_id` is 0 if nothing is held. A lease holds the keys of all runs, in order, and `BeginLoad.first` is an index
    into them. `fetched` are the runs of keys that came from the fleet tier while the lookup waited for it.
    """

    KIND: ClassVar = Kind.FOUND
    lease_id: U64
    runs: Runs
    fetched: Runs = ()

    @property
    def leading(self) -> int:
        """How many keys are present before the first absent one."""
        return self.runs[0][1] if self.runs and self.runs[0][0] == 0 else 0


class Pending(Packed, frozen=True):
    """Say that the answer to a lookup takes time: the fleet tier may have more blocks, or the ranks are still
    registering the memory. The answer follows later, under the same request id. Answers to other calls may come before
    it."""

    KIND: ClassVar = Kind.PENDING


class Prefill(Packed, frozen=True):
    """Report the cost of computing prompts, and the time that loads have saved: see `PrefillNews`. No answer."""

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
    """End leases. A lease that has ended already is ignored. No answer."""

    KIND: ClassVar = Kind.RELEASE
    lease_ids: U64s


class BeginLoad(Packed, frozen=True):
    """Load `count` slots of a lease, from its slot `first` on. This ends the lease. `choice` is one of `LOAD_CHOICES`,
    and is counted in the pool's statistics."""

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
    """The answer to `BeginLoad`: the load's op, and the slots to read."""

    KIND: ClassVar = Kind.LOAD_BEGUN
    op_id: U64
    slots: U32s


class BeginStore(Packed, frozen=True):
    """Ask to store one block under each of `keys`."""

    KIND: ClassVar = Kind.BEGIN_STORE
    MOST_BYTES: ClassVar = 96 << 10
    keys: StoredKeys
    request_id: Text = ""


class StoreBegun(Packed, frozen=True):
    """The answer to `BeginStore`: the store's op, or 0 if there is nothing to store.

    `accepted` holds indexes into the requested keys. The block of key `accepted[i]` goes to `slots[i]`. For `outcomes`
    and `unplaced`, see `StoreGrant`. `room` is the number of blocks for which the next store would find a slot.
    `incomplete` are the numbers of running requests of the session that lack blocks from now on, because their slots
    were lent to others or their store was deferred. It is worth offering their chains again when they end.
    """

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


_DescribedBytes = Annotated[tuple[bytes, ...], Meta(max_length=MOST_STORED)]
_DescribedNames = Annotated[tuple[str | None, ...], Meta(max_length=MOST_STORED)]
_DESCRIPTIONS_BYTES = 512 << 10
"""The limit for the descriptions in one message, in bytes."""


class DescribeStore(Packed, frozen=True):
    """Say what blocks of a store hold, for engines that publish KV events: each block by its number in the store, and
    then as in `DescribedBlocks`. The engine sends it before the completions of the store. No answer."""

    KIND: ClassVar = Kind.DESCRIBE_STORE
    MOST_BYTES: ClassVar = 1 << 20
    op_id: U64
    numbers: Annotated[tuple[U32, ...], Meta(max_length=MOST_STORED)]
    tokens: _DescribedBytes
    parents: _DescribedBytes = ()
    block_hashes: _DescribedBytes = ()
    extra_keys: _DescribedBytes = ()
    lora_ids: Annotated[tuple[int | None, ...], Meta(max_length=MOST_STORED)] = ()
    lora_names: _DescribedNames = ()
    session_ids: _DescribedNames = ()

    def __repr__(self) -> str:
        return f"DescribeStore({self.op_id}, {len(self.numbers)} blocks)"

    @classmethod
    def listed(cls, op_id: int, blocks: Sequence[BlockDescription | None]) -> Iterator[Self]:
        """Make messages that carry the descriptions of a store's blocks. Blocks are left out if they have no
        description, or one that cannot be sent."""
        numbers = [number for number, block in enumerate(blocks) if block is not None]
        return cls._in_parts(op_id, numbers, [block for block in blocks if block is not None])

    @classmethod
    def _in_parts(cls, op_id: int, numbers: Sequence[int], blocks: Sequence[BlockDescription]) -> Iterator[Self]:
        if not blocks:
            return
        columns, middle = DescribedBlocks.of(blocks), len(blocks) // 2
        if _fits(columns):
            yield cls(op_id, tuple(numbers), *columns)
        elif middle:
            yield from cls._in_parts(op_id, numbers[:middle], blocks[:middle])
            yield from cls._in_parts(op_id, numbers[middle:], blocks[middle:])

    @property
    def blocks(self) -> DescribedBlocks:
        """The descriptions without the numbers."""
        return DescribedBlocks(
            self.tokens,
            self.parents,
            self.block_hashes,
            self.extra_keys,
            self.lora_ids,
            self.lora_names,
            self.session_ids,
        )

    def check(self) -> None:
        blocks = self.blocks
        count = len(self.tokens)
        if len(self.numbers) != count or any(len(column) not in (0, count) for column in blocks):
            raise ValueError(f"{len(self.numbers)} blocks, of which {count} have tokens, are described")
        # The control plane, which uses descriptions, does without msgspec. So their limits are checked here.
        most, lengths = max(blocks.sizes(), default=0), set(map(len, self.tokens))
        if most > MOST_DESCRIPTION or any(not length or length % TOKEN_BYTES for length in lengths):
            raise ValueError(
                f"a description has up to {most} bytes, {min(lengths)} or more of them for tokens; allowed: "
                f"{MOST_DESCRIPTION}, with {TOKEN_BYTES} for each of 1 or more tokens"
            )


def _fits(blocks: DescribedBlocks) -> bool:
    """Say whether one message can carry these descriptions. Their names are those of clients, and half a surrogate
    cannot be sent."""
    try:
        sizes = blocks.sizes()
    except UnicodeError:
        return False
    return max(sizes) <= MOST_DESCRIPTION and sum(sizes) <= _DESCRIPTIONS_BYTES


_MOST_SECONDS = 1e9
"""A duration in a completion is shorter than this."""


class Completions(Packed, frozen=True):
    """Report completions of a rank's ops, in order. The service sends the results later, in `SettledOps`."""

    KIND: ClassVar = Kind.COMPLETIONS
    MOST_BYTES: ClassVar = 1 << 20
    rank: U32
    boot_id: Text
    completions: Annotated[tuple[Completion, ...], Meta(max_length=MOST_COMPLETIONS)]

    @classmethod
    def listed(cls, rank: int, boot_id: str, completions: Sequence[Completion]) -> Iterator[Self]:
        """Make messages of these completions, each of which has at most `MOST_COMPLETIONS`. Errors are cut, and become
        plain text."""
        clean = [replace(done, error=plain(done.error, MOST_ERROR)) if done.error else done for done in completions]
        for start in range(0, len(clean), MOST_COMPLETIONS):
            yield cls(rank, boot_id, tuple(clean[start : start + MOST_COMPLETIONS]))

    def check(self) -> None:
        # `Completion` is a type of the data plane, which does without msgspec. So its limits are checked here.
        for done in self.completions:
            if done.error and not is_plain(done.error, MOST_ERROR):
                raise ValueError(
                    f"the error of op {done.op_id} is {done.error[:100]!a}; allowed: one line of printable characters"
                )
            durations = (done.seconds, done.queue_seconds)
            if done.op_id < 0 or done.num_bytes < 0 or not all(0 <= one < _MOST_SECONDS for one in durations):
                raise ValueError(
                    f"op {done.op_id} has moved {done.num_bytes} bytes in {durations[0]} seconds, and was queued for "
                    f"{durations[1]} seconds"
                )


class SettledOp(PackedPart, frozen=True):
    """The final result of an op of this session: see `kvstow.results.Settled`."""

    op_id: U64
    direction: Direction
    mark: Mark
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error:
            force_setattr(self, "error", plain(self.error))


class SettledOps(Packed, frozen=True):
    """Final results, in order. The service sends them without a request. For `room` and `incomplete`, see
    `StoreBegun`."""

    KIND: ClassVar = Kind.SETTLED
    ops: tuple[SettledOp, ...]
    room: U64 = 0
    incomplete: U64s = ()


class Admit(Packed, frozen=True):
    """A request begins to compute: see `Session.admit`. The engine has chosen its number. No answer."""

    KIND: ClassVar = Kind.ADMIT
    number: U64
    keys: Keys
    looked_up: tuple[U32, U32]
    hints: Hints | None = None
    salt: Digest = b""

    def check(self) -> None:
        first, stop = self.looked_up
        if stop < first:
            raise ValueError(f"the looked-up blocks begin at {first} and end at {stop}")
        if self.hints is not None:
            _check_hints(self.hints)


class End(Packed, frozen=True):
    """A request has ended. For `more` and `others`, see `Session.end_request`. For `status` and `tokens`, see `Ending`.
    No answer."""

    KIND: ClassVar = Kind.END
    number: U64
    status: Status = "other"
    tokens: tuple[U64, U64] | None = None
    more: Keys = ()
    others: Keys = ()


def _check_hints(hints: Hints) -> None:
    """Raise `ValueError` for hints beyond their limits. `Hints` is a type of the control plane, which does without
    msgspec, so its limits are checked here."""
    context = hints.context
    if context is not None and len(context) != CONTEXT_BYTES:
        raise ValueError(f"the id of a context has {len(context)} bytes; allowed: {CONTEXT_BYTES}")
    for name, seconds in (("resume_in", hints.resume_in), ("keep_for", hints.keep_for)):
        if seconds is not None and not 0 <= seconds <= LONGEST_PAUSE:
            raise ValueError(f"the hint {name} is {seconds} seconds; allowed: 0 to {LONGEST_PAUSE:.0f}")
    if not is_plain(hints.name, MOST_NAME_CHARS):
        raise ValueError(f"a context is named {hints.name[:100]!a}; allowed: {MOST_NAME_CHARS} printable characters")
    if len(hints.ignored) > len(HINTS_IGNORED) or not set(hints.ignored) <= set(HINTS_IGNORED):
        raise ValueError(f"hints were ignored for {ascii(hints.ignored)[:100]}; allowed: {', '.join(HINTS_IGNORED)}")


class CountLookup(Packed, frozen=True):
    """Count one lookup of `queried` blocks that found `hits`. No answer."""

    KIND: ClassVar = Kind.COUNT_LOOKUP
    queried: U32
    hits: U32

    def check(self) -> None:
        if self.hits > self.queried:
            raise ValueError(f"{self.hits} hits of {self.queried} blocks")


class Reset(Packed, frozen=True):
    """Move this session to a fresh epoch. Other sessions keep their blocks."""

    KIND: ClassVar = Kind.RESET


class ResetDone(Packed, frozen=True):
    """The answer to `Reset`: the session's new namespace. `notice`: see `kvstow.tier.blockstore.Purged`."""

    KIND: ClassVar = Kind.RESET_DONE
    namespace: Text
    notice: Text = ""


class BlockChange(NamedTuple):
    """Blocks that lookups find from now on (`stored`), or find no longer (`removed`). `described`: what is known of
    stored ones from other sessions, each with the index of its key."""

    kind: Literal["stored", "removed"]
    keys: Keys
    described: tuple[tuple[U32, BlockDescription], ...] = ()


class ReadEvents(Packed, frozen=True):
    """Ask for the events after this cursor. 0 starts at the oldest event that the service keeps."""

    KIND: ClassVar = Kind.READ_EVENTS
    after: U64


class EventPage(Packed, frozen=True):
    """The answer to `ReadEvents`: changes of the blocks of the session's namespace, in order. `cursor` is the position
    after the last event of the page. `lost` means that events before this page were dropped. `has_more` means that
    another page can be read at once."""

    KIND: ClassVar = Kind.EVENTS
    cursor: U64
    changes: tuple[BlockChange, ...]
    lost: bool = False
    has_more: bool = False


class ExtentGrant(NamedTuple):
    """An extent that a rank may map. `number` is its position among the rank's extents. Extents with the same number
    hold the same slots on all ranks of a pool."""

    extent_id: U64
    number: U32
    first_slot: U32
    num_slots: U32
    num_bytes: U64
    populated_bytes: U64


class ExtentBytes(NamedTuple):
    """The first `num_bytes` bytes of an extent."""

    extent_id: U64
    num_bytes: U64


class ExtentSlots(NamedTuple):
    """The first `num_slots` slots of an extent."""

    extent_id: U64
    num_slots: U32


class GrantedExtents(Packed, frozen=True):
    """Let the rank map these extents. The frame has one descriptor for each extent, in the same order.

    With `is_all`, the worker has now been granted every extent. It releases those that it still has mapped from an
    earlier session, unless they were granted in this one. The service sends `is_all` once in each session, even if it
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
    """Report how many slots of each extent, counted from its first slot, the worker can copy to and from."""

    KIND: ClassVar = Kind.REGISTERED
    extents: Annotated[tuple[ExtentSlots, ...], Meta(max_length=MOST_LISTED)]


class PopulatedExtents(Packed, frozen=True):
    """Publish how many bytes of each extent, counted from its start, are populated. The numbers only grow."""

    KIND: ClassVar = Kind.POPULATED
    extents: tuple[ExtentBytes, ...]


class RevokedExtents(Packed, frozen=True):
    """Tell the worker to unregister and unmap these extents as soon as no copy uses them. The worker answers with
    `ReleasedExtents`. With `at_end`, the service is ending, and the extents may have slots of loads that it has
    granted. Otherwise they have none."""

    KIND: ClassVar = Kind.REVOKED
    extent_ids: U64s
    at_end: bool = False


class ReleasedExtents(Packed, frozen=True):
    """Report that this process no longer has these extents mapped, registered or open."""

    KIND: ClassVar = Kind.RELEASED
    extent_ids: U64s


class Report(Packed, frozen=True):
    """Report the state of a rank. The answer is `Desired`.

    `clock` is the sender's time of day, in seconds since 1970. A receiver on another host compares it with its own.
    """

    KIND: ClassVar = Kind.REPORT
    report: RankReport
    clock: float = 0.0

    @classmethod
    def now(cls, report: RankReport) -> Self:
        """Make a message of a report. The sentences become printable, because receivers refuse others, and messages of
        exceptions may have several lines."""
        error, notice = (None if words is None else plain(words) for words in (report.error, report.notice))
        return cls(replace(report, error=error, notice=notice), time.time())

    def pack(self) -> bytes:
        return _packed((self.clock, self.report), "report")

    @classmethod
    def _unpack_whole(cls, payload: bytes) -> Self:
        clock, report = decoded(_read_report, payload, "report")
        return cls(decoded(lambda _: _checked(RankReport, report), payload, "report"), clock)


class Desired(Packed, frozen=True):
    """The desired state of a rank. It is the answer to a report. An embedded engine also sends it whenever it
    changes."""

    KIND: ClassVar = Kind.DESIRED
    desired: DesiredState

    def pack(self) -> bytes:
        return _packed(self.desired, "desired state")

    @classmethod
    def _unpack_whole(cls, payload: bytes) -> Self:
        return cls(decoded(lambda data: _checked(DesiredState, _read_map(data)), payload, "desired state"))


_MAX_ENTRIES = 64
"""The limit for the entries of a mapping in a report: reasons of failures, and NUMA nodes."""
_Clock = Annotated[float, Meta(ge=0, lt=1e12)]
_read_report = msgspec.msgpack.Decoder(tuple[_Clock, dict[str, Any]]).decode
_read_map = msgspec.msgpack.Decoder(dict[str, Any]).decode
_S = TypeVar("_S", RankReport, DesiredState)


def _packed(value: Any, what: str) -> bytes:
    """Pack a report or a desired state. They are maps of their fields, so that an error can name the field. Raises
    `ProtocolError` for a value that cannot be sent."""
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeError, OverflowError) as error:
        raise ProtocolError("malformed", f"{what}: {error}") from error


def _checked(kind: type[_S], value: dict[str, Any]) -> _S:
    """Make a report or a desired state of its fields. These types belong to the data plane, which does without msgspec,
    so their limits are checked here. Raises `ValueError` that names the field which is unknown, missing or wrong."""
    known = kind.__dataclass_fields__
    if unknown := sorted(set(value) - set(known)):
        raise ValueError(f"{kind.__name__} has unknown fields {unknown}; allowed: {sorted(known)}")
    message = msgspec.convert(value, kind)
    for name in known:
        if not _is_sound(getattr(message, name)):
            allowed = f"numbers of 0 or more, and up to {MOST_TEXT} printable characters or {_MAX_ENTRIES} entries"
            raise ValueError(f"{kind.__name__}.{name} is {value[name]!a:.200}; allowed: {allowed}")
    return message


def _is_sound(value: Any) -> bool:
    """Say whether a field's value makes sense. Negative numbers never do, and NaN is not 0 or more either."""
    if isinstance(value, str):
        return is_plain(value)
    if isinstance(value, Mapping):
        return len(value) <= _MAX_ENTRIES and all(map(_is_sound, (*value, *value.values())))
    return value is None or 0 <= value < 1 << 63


class Detach(Packed, frozen=True):
    """End the session of this process, which has nothing of the pool mapped and no copy under way. No answer."""

    KIND: ClassVar = Kind.DETACH
    reason: Text = ""


def listed(rows: Sequence[_T]) -> Iterator[tuple[_T, ...]]:
    """Divide the rows into pieces that are short enough for one message."""
    for start in range(0, len(rows), MOST_LISTED):
        yield tuple(rows[start : start + MOST_LISTED])
