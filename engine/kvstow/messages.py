"""The messages between the control plane and the data plane.

Frozen dataclasses of plain values: picklable for an inference engine's own channel; `RankReport` and
`DesiredState` also travel as JSON between an agent and the admin server (`to_json` / `from_json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar, get_args

from kvstow.errors import InvalidRequestError
from kvstow.plaintext import MOST_TEXT, is_plain, plain

Direction = Literal["store", "load"]
TierDirection = Literal["read", "write"]
Mark = Literal["source_free", "done", "failed"]
LayerWay = Literal["kernel", "engine"]
RankState = Literal["starting", "pinning", "ready", "degraded", "failed", "stopped"]

RANK_STATES: tuple[RankState, ...] = get_args(RankState)


@dataclass(frozen=True, slots=True)
class Op:
    """One store or load: pair `i` moves block `blocks[i]` to or from slot `slots[i]` on every rank.

    `op_id` is never reused by an engine. `boots[rank]`: the boot whose memory has the slots; empty if the memory is not
    that of the ranks.
    """

    op_id: int
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    boots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StagedLoad:
    """A rank has the first `num_pieces` pieces of a load in staging memory. For devices with a `Launcher`."""

    op_id: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class LoadLaunch:
    """The pieces `first` to `stop` - 1 of a load of `num_blocks` blocks are launched in a step, on every rank: also on
    one where the load has failed, which then writes nothing."""

    op_id: int
    num_blocks: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The ops that start with one step of the host, in order. `launches` come before them; they are for devices with a
    `Launcher`, where an op that loads only stages its bytes until then (see `LaunchOrder`)."""

    ops: tuple[Op, ...] = ()
    launches: tuple[LoadLaunch, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Progress of one op on one rank.

    `source_free`: the blocks of a store may be overwritten on this rank. `done` (implies it): the host bytes are
    valid, or the blocks of a load are written. `failed`: no byte of the op can be trusted, and this rank no longer
    reads or writes its blocks and slots.
    """

    op_id: int
    mark: Mark
    error: str | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """Which process a rank is, and its state.

    `boot_id` changes when the rank's process or pool restarts: its memory is empty then. `host` and `pid` name the
    process, and `device` the device of its KV cache ("cpu", "cuda:1"); null if unknown.
    """

    rank: int
    boot_id: str | None
    host: str | None = None
    pid: int | None = None
    device: str | None = None
    state: RankState
    error_reason: str | None = None
    error: str | None = None
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class PoolFigures:
    """What a rank measures of its pool. Times are in seconds.

    `pinned_slots` counts from slot 0: the slots below it are usable. `pin_mode` is what pinning means on this device
    ("mlock", "populate", "cuda", ...), `locked_bytes` how many of the pinned bytes are locked in memory; `notice` is a
    message for operators if that is less than all. `pin_rate_bytes_per_second`: bytes pinned by the current or last
    growth of the pool, divided by the time that it took; null until a chunk of it is pinned. `pin_failures` counts them
    by reason since the pool was made.
    """

    pinned_slots: int
    target_slots: int
    pinned_bytes: int
    target_bytes: int
    pin_rate_bytes_per_second: float | None = None
    pin_elapsed_seconds: float = 0.0
    pin_mode: str = "none"
    locked_bytes: int = 0
    resident_bytes: int = 0
    chunks_done: int = 0
    chunks_total: int = 0
    chunks_failed: int = 0
    notice: str | None = None
    pin_failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CopyFigures:
    """What a rank counts of its ops. Current values: `pending_ops`, which it has not finished, `queued_*` (included in
    them), and `uncollected_completions`, which wait for the host. The others only grow, and count ops that were done.
    """

    pending_ops: int = 0
    queued_stores: int = 0
    queued_loads: int = 0
    uncollected_completions: int = 0
    store_bytes_total: int = 0
    load_bytes_total: int = 0
    store_busy_seconds: float = 0.0
    load_busy_seconds: float = 0.0


SLOW_KERNEL = 0.8
"""Of the copy engine's rate: a kernel that reads host memory at less than this is slow."""


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """The two ways by which a device can bring loads by layer, and how fast each is: a kernel that reads host memory,
    and the copy engine. `layer_way`: the one that such loads take now; null if there are none, or the device has one
    way. Rates are in bytes per second, null until they were measured; the engine's stays null where layers do not lie
    together in a slot.
    """

    layer_way: LayerWay | None = None
    layer_kernel_bytes_per_second: float | None = None
    layer_engine_bytes_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankFigures(LayerFigures, CopyFigures, PoolFigures, RankProcess):
    """What a rank knows of itself; its process first, as fields of the last base come first.

    `stale_desired_states` counts desired states that it ignored because a newer one had arrived first. `numa_bytes`:
    the pool's memory by NUMA node, empty if the kernel does not report it.
    """

    stale_desired_states: int = 0
    numa_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankReport(RankFigures):
    """The figures of one rank, sent every second and on change.

    `sender` identifies the rank's process, and `number` grows with each of its reports, whatever path they take: a
    report is newer than all with smaller numbers. `engine_id` and `applied`: engine and number of the desired state
    that the rank had last applied when it counted its slots; "" and 0 if it had applied none.
    """

    boot_id: str
    engine_id: str = ""
    applied: int = 0
    sender: str
    number: int

    @classmethod
    def without_pool(
        cls,
        rank: int,
        boot_id: str,
        state: RankState,
        slot_bytes: int,
        *,
        error_reason: str | None = None,
        error: str | None = None,
    ) -> RankReport:
        """The report of a rank that has no pool."""
        return cls(
            rank=rank,
            boot_id=boot_id,
            state=state,
            slot_bytes=slot_bytes,
            pinned_slots=0,
            target_slots=0,
            pinned_bytes=0,
            target_bytes=0,
            sender="",
            number=0,
            error_reason=error_reason,
            error=error,
        )

    def to_json(self) -> dict[str, Any]:
        """The sentences are made printable, because a receiver refuses what is not: messages of exceptions may have
        several lines."""
        value = asdict(self)
        for name in ("error", "notice"):
            value[name] = None if value[name] is None else plain(value[name])
        return value

    @classmethod
    def from_json(cls, value: Any) -> RankReport:
        """Raises `InvalidRequestError`, which names the field that is unknown, missing, or has a wrong value."""
        return _from_json(cls, value)


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What the control plane wants from a rank.

    `engine_id` identifies one life of the engine, and `number` grows with each change in it: a rank ignores smaller
    numbers (`NewestDesiredState`). `capacity_slots`: pin up to it; free the memory above. `paused`: start no
    further chunk. `pin_attempt`: when it grows, try a failed chunk again.
    """

    engine_id: str
    capacity_slots: int
    paused: bool = False
    pin_attempt: int = 0
    number: int = field(kw_only=True)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> DesiredState:
        """Raises `InvalidRequestError`, which names the field that is unknown, missing, or has a wrong value."""
        return _from_json(cls, value)


_MAX_ENTRIES = 64  # of a mapping in a message: failure reasons and NUMA nodes are few

_Message = TypeVar("_Message", RankReport, DesiredState)


def figures_of(kind: type[RankFigures | PoolFigures | CopyFigures | LayerFigures], of: Any) -> dict[str, Any]:
    """The fields of `kind`, which is a base of the class of `of`, as keyword arguments."""
    return {name: getattr(of, name) for name in kind.__dataclass_fields__}


def _from_json(cls: type[_Message], value: Any) -> _Message:
    from msgspec import ValidationError, convert  # who gets messages has it; the devices work without

    known = cls.__dataclass_fields__
    if isinstance(value, dict) and (unknown := sorted(set(value) - set(known))):
        raise InvalidRequestError(f"{cls.__name__} has unknown fields {unknown}; allowed: {sorted(known)}")
    try:
        message = convert(value, cls)
    except (ValidationError, UnicodeEncodeError) as error:  # the latter from a lone surrogate
        raise InvalidRequestError(f"{cls.__name__}: {plain(str(error))}") from error
    for name in known:
        if not _is_sound(getattr(message, name)):
            allowed = f"numbers of 0 or more, and up to {MOST_TEXT} printable characters or {_MAX_ENTRIES} entries"
            raise InvalidRequestError(f"{cls.__name__}.{name} is {value[name]!a:.200}; allowed: {allowed}")
    return message


def _is_sound(value: Any) -> bool:
    """Negative numbers never make sense in a message; NaN is not 0 or more either."""
    if isinstance(value, str):
        return is_plain(value)
    if isinstance(value, Mapping):
        return len(value) <= _MAX_ENTRIES and all(map(_is_sound, (*value, *value.values())))
    return value is None or 0 <= value < 1 << 63
