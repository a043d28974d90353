"""The messages between the control plane and the data plane.

Frozen dataclasses of plain values. Those of a step are picklable, because an inference engine's own channel carries
them. A `RankReport` and the `DesiredState` that answers it have one form in bytes: see `kvstow.attach.calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Direction = Literal["store", "load"]
TierDirection = Literal["read", "write"]
Mark = Literal["source_free", "done", "failed"]
LayerWay = Literal["kernel", "engine"]
RankState = Literal["starting", "pinning", "ready", "degraded", "failed", "stopped"]

RANK_STATES: tuple[RankState, ...] = get_args(RankState)

SLOW_KERNEL = 0.8
"""A kernel that reads host memory is slow if it reaches less than this share of the copy engine's rate."""


@dataclass(frozen=True, slots=True)
class Op:
    """One store or load: pair `i` moves block `blocks[i]` to or from slot `slots[i]` on every rank.

    An engine never reuses an `op_id`. `boots[rank]`: the boot whose memory has the slots; empty if the ranks do not own
    the memory.
    """

    op_id: int
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    boots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StagedLoad:
    """A rank has the first `num_pieces` pieces of a load in staging memory. Only devices with a `Launcher` send it."""

    op_id: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class LoadLaunch:
    """Every rank launches the pieces `first` to `stop` - 1 of a load of `num_blocks` blocks in a step. A rank on which
    the load has failed launches them, too, and then writes nothing."""

    op_id: int
    num_blocks: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The ops that start with one step of the host, in order. `launches` come before them. They are for devices with a
    `Launcher`, on which a load only stages its bytes until it is launched (see `LaunchOrder`)."""

    ops: tuple[Op, ...] = ()
    launches: tuple[LoadLaunch, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Progress of one op on one rank.

    `source_free`: the blocks of a store may be overwritten on this rank. `done`, which implies it: the host bytes of a
    store are valid, or the blocks of a load are written. `failed`: no byte of the op can be trusted, and this rank no
    longer reads or writes its blocks and slots.
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

    `boot_id` changes when the rank's process or pool restarts, and then its memory is empty. `host` and `pid` name the
    process, and `device` names the device of its KV cache ("cpu", "cuda:1"). They are null if unknown.
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

    The slots from 0 to `pinned_slots` - 1 are usable. `pin_mode` is what pinning means on this device ("mlock",
    "populate", "cuda", ...). `locked_bytes` is how many of the pinned bytes are locked in memory, and `notice` is a
    message for operators if some are not. `pin_rate_bytes_per_second`: bytes pinned by the current or last growth of
    the pool, divided by the time that it took; null until a chunk of it is pinned. `pin_failures` counts the failures
    to pin by reason, since the pool was made.
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
    """What a rank counts of its ops. Three are current values: `pending_ops` are those that it has not finished,
    `queued_*` are those among them that wait, and `uncollected_completions` wait for the host. The others only grow,
    and count ops that were done."""

    pending_ops: int = 0
    queued_stores: int = 0
    queued_loads: int = 0
    uncollected_completions: int = 0
    store_bytes_total: int = 0
    load_bytes_total: int = 0
    store_busy_seconds: float = 0.0
    load_busy_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """The two ways by which a device can bring loads by layer, and how fast each is: a kernel that reads host memory,
    and the copy engine. `layer_way`: the way that such loads take now; null if there are no such loads, or the device
    has only one way. Rates are in bytes per second, and null until they are measured. The copy engine's rate stays null
    if layers do not lie together in a slot.
    """

    layer_way: LayerWay | None = None
    layer_kernel_bytes_per_second: float | None = None
    layer_engine_bytes_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankFigures(LayerFigures, CopyFigures, PoolFigures, RankProcess):
    """What a rank knows of itself. The fields of its process come first, because those of the last base do.

    `numa_bytes`: the pool's memory by NUMA node; empty if the kernel does not report it.
    """

    numa_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankReport(RankFigures):
    """The figures of one rank, sent every second and on change.

    `engine_id` and `applied`: the engine and the number of the desired state that the rank had last applied when it
    counted its slots; "" and 0 if it had applied none. `sender` identifies the rank's process, and `number` grows with
    each report that it sends, so a report is newer than all reports with smaller numbers. What sends a report sets both
    (see `ReportNumbers`). They are empty in a report that is not sent.
    """

    boot_id: str
    engine_id: str = ""
    applied: int = 0
    sender: str = ""
    number: int = 0

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
            error_reason=error_reason,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What the control plane wants from a rank.

    `engine_id` identifies one life of the engine, and `number` grows with each change in it. `capacity_slots`: the rank
    pins so many slots, and frees the memory above. `paused`: the rank starts no further chunk. `pin_attempt`: when it
    grows, the rank tries a failed chunk again.
    """

    engine_id: str
    capacity_slots: int
    paused: bool = False
    pin_attempt: int = 0
    number: int = field(kw_only=True)

    def replaces(self, applied: DesiredState) -> bool:
        """Whether a rank that has applied `applied` applies this one. Applying an older one of the same engine would
        undo a growth while copies use the slots, or restore a pause that has ended."""
        return self.engine_id != applied.engine_id or self.number > applied.number


def figures_of(kind: type[RankFigures | PoolFigures | CopyFigures | LayerFigures], of: Any) -> dict[str, Any]:
    """The fields of `kind`, which is a base of the class of `of`, as keyword arguments."""
    return {name: getattr(of, name) for name in kind.__dataclass_fields__}
