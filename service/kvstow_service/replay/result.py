"""The results of a replay. They are counted while it runs, and shown at its end, to programs and to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstow.bytesize import format_size

if TYPE_CHECKING:
    from rich.console import Console

_NAMED_MISMATCHES = 5
_NOT_ADDED = ("first_mismatches", "first_blocks", "first_hit_blocks", "ranks", "slots", "policy", "evicted_blocks")
_DERIVED = ("block_hit_rate", "dropped_stores", "mean_request_seconds")


@dataclass(slots=True)
class Copied:
    """The copies in one direction. `blocks` counts a block once for all ranks. `num_bytes`, and the `seconds` in which
    copies were active, are sums over the ranks, of successful copies only. The `failed` blocks of loads were computed
    again, and those of stores were not published."""

    blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failed: int = 0

    @property
    def gbps(self) -> float:
        """The copy rate of one rank while it copied, in 10^9 bytes per second, without waiting and checking. 0 if
        nothing was copied."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def add(self, other: Copied) -> None:
        self.blocks += other.blocks
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds
        self.failed += other.failed


@dataclass(slots=True)
class ReplayResult:
    """The figures of a replay. They can be pickled.

    `hit_blocks` counts the leading blocks that lookups found and that a load began to copy. `verified_bytes` is how
    many loaded bytes were compared with the expected ones, and `mismatches` the number of (block, rank) pairs with a
    wrong byte. `drops` counts blocks that found no slot, by reason. `abandoned` counts requests that a stop cut off.
    `first_blocks` and `first_hit_blocks` are those of the first request. `request_seconds` is the sum of the times from
    the start of each request until its last block was loaded or computed. `seconds` is wall-clock time. `slots`,
    `policy` and `evicted_blocks` are the pool's; the last two are None if only the node service knows them.
    """

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    stored: Copied = field(default_factory=Copied)
    loaded: Copied = field(default_factory=Copied)
    verified_bytes: int = 0
    mismatches: int = 0
    first_mismatches: list[str] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    first_blocks: int = 0
    first_hit_blocks: int = 0
    request_seconds: float = 0.0
    seconds: float = 0.0
    ranks: int = 0
    slots: int = 0
    policy: str | None = None
    evicted_blocks: int | None = None

    @property
    def ok(self) -> bool:
        """Whether every loaded byte was correct."""
        return self.mismatches == 0

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def dropped_stores(self) -> int:
        return self.drops.total()

    @property
    def mean_request_seconds(self) -> float:
        return self.request_seconds / self.requests if self.requests else 0.0

    @classmethod
    def together(cls, results: Sequence[ReplayResult], *, seconds: float) -> ReplayResult:
        """Add up replays on the same number of ranks that ran one after the other or at the same time."""
        total = cls()
        for one in results:
            for name in cls.__slots__:
                if isinstance(copied := getattr(total, name), Copied):
                    copied.add(getattr(one, name))
                elif name not in _NOT_ADDED:
                    setattr(total, name, getattr(total, name) + getattr(one, name))
            total.first_mismatches = (total.first_mismatches + one.first_mismatches)[:_NAMED_MISMATCHES]
            total.ranks, total.slots = one.ranks or total.ranks, max(total.slots, one.slots)
        total.seconds = seconds
        return total

    def count_mismatches(self, places: Sequence[str]) -> None:
        self.mismatches += len(places)
        self.first_mismatches = [*self.first_mismatches, *places][:_NAMED_MISMATCHES]

    def to_json(self) -> dict[str, Any]:
        copied = {
            "stored_blocks": self.stored.blocks,
            "loaded_blocks": self.loaded.blocks,
            "stored_bytes": self.stored.num_bytes,
            "loaded_bytes": self.loaded.num_bytes,
            "store_seconds": self.stored.seconds,
            "load_seconds": self.loaded.seconds,
            "failed_loads": self.loaded.failed,
            "failed_stores": self.stored.failed,
            "load_gbps": self.loaded.gbps,
            "store_gbps": self.stored.gbps,
        }
        own = [name for name in self.__slots__ if name not in ("stored", "loaded")]
        return {name: getattr(self, name) for name in (*own, *_DERIVED)} | copied

    def rows(self) -> list[Row]:
        """Return the lines to show, in reading order."""
        reasons = ", ".join(f"{reason.removeprefix('dropped_')} {count:,}" for reason, count in self.drops.items())
        policy = f", {self.policy}" if self.policy is not None else ""
        rows = [
            ("requests", f"{self.requests:,} in {self.seconds:.1f} s"),
            ("pool", f"{self.slots:,} slots on {self.ranks} rank{'s' if self.ranks > 1 else ''}{policy}"),
            ("hit ratio", f"{self.block_hit_rate:.2%} ({self.hit_blocks:,} of {self.blocks:,} blocks)"),
            ("loaded", _moved(self.loaded)),
            ("stored", _moved(self.stored)),
            *([] if self.evicted_blocks is None else [("evicted", f"{self.evicted_blocks:,} blocks")]),
            ("dropped stores", f"{self.dropped_stores:,} blocks" + (f" ({reasons})" if reasons else "")),
            ("failed", f"{self.loaded.failed:,} loaded, {self.stored.failed:,} stored blocks"),
            ("verified", f"{format_size(self.verified_bytes)} of {format_size(self.loaded.num_bytes)} loaded"),
            ("mismatches", f"{self.mismatches:,} blocks"),
        ]
        if self.abandoned:
            rows.append(("abandoned", f"{self.abandoned:,} requests"))
        return rows + [("wrong bytes", place) for place in self.first_mismatches]


class Position(NamedTuple):
    """How far a replay is: the numbers of the running requests, and of the next one to start."""

    in_flight: tuple[int, ...] = ()
    next: int = 0


@dataclass(frozen=True, slots=True)
class EngineLife:
    """The last report of one process of an attached engine. `sessions` is how often it has attached, and `problem` why
    it is not attached now. `waits` counts lookups that the service answered later, because the store below its pools
    might have more, or because a rank was still registering what was found. The numbers in `position` are those of the
    requests in the list that this process was given. `end` is empty while it runs, then "finished" or how it died."""

    result: ReplayResult = field(default_factory=ReplayResult)
    position: Position = field(default_factory=Position)
    sessions: int = 0
    seconds_without: float = 0.0
    problem: str | None = None
    waits: int = 0
    end: str = ""

    def to_json(self) -> dict[str, Any]:
        names = ("requests", "blocks", "hit_blocks", "first_blocks", "first_hit_blocks", "seconds")
        return {name: getattr(self.result, name) for name in names} | {"end": self.end}


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The results of one engine over all its lives."""

    name: str
    lives: Sequence[EngineLife]

    @property
    def result(self) -> ReplayResult:
        lives = [life.result for life in self.lives]
        return ReplayResult.together(lives, seconds=sum(one.seconds for one in lives))

    @property
    def problem(self) -> str | None:
        """Why the engine was not attached at its end. None if it was."""
        return self.lives[-1].problem if self.lives else None

    @property
    def sessions(self) -> int:
        return sum(life.sessions for life in self.lives)

    @property
    def waits(self) -> int:
        return sum(life.waits for life in self.lives)

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            **self.result.to_json(),
            "sessions": self.sessions,
            "restarts": len(self.lives) - 1,
            "seconds_without_service": sum(life.seconds_without for life in self.lives),
            "problem": self.problem,
            "waits": self.waits,
            "lives": [life.to_json() for life in self.lives],
        }


@dataclass(frozen=True, slots=True)
class AttachedResult:
    """The results of all engines. `seconds` is wall-clock time."""

    engines: Sequence[EngineResult]
    seconds: float

    @property
    def total(self) -> ReplayResult:
        return ReplayResult.together([engine.result for engine in self.engines], seconds=self.seconds)

    @property
    def ok(self) -> bool:
        return self.total.ok

    def to_json(self) -> dict[str, Any]:
        engines = [engine.to_json() for engine in self.engines]
        sums = {name: sum(engine[name] for engine in engines) for name in ("sessions", "restarts", "waits")}
        return {**self.total.to_json(), **sums, "engines": engines}

    def rows(self) -> list[Row]:
        """Return the lines for all engines together, and one for each engine if there are several or one was
        restarted."""
        rows = self.total.rows()
        # Only the service knows how many blocks were fetched, because several engines may wait for the same ones.
        tier = "no look-up waited: the service has no store below its pools, or reads do not pay; see `kvstow get tier`"
        if waits := sum(engine.waits for engine in self.engines):
            tier = f"{waits:,} look-ups waited for the service; `kvstow get tier` shows what was read and written"
        rows.append(("tier", tier))
        if len(self.engines) == 1 and len(self.engines[0].lives) == 1:
            return rows
        for engine in self.engines:
            text = f"hit ratio {engine.result.block_hit_rate:.2%} in {engine.result.requests:,} requests"
            for life in engine.lives[1:]:
                first = life.result
                text += f"; started again: {first.first_hit_blocks:,} of the first {first.first_blocks:,} blocks found"
            rows.append((engine.name, text))
        return rows


Row = tuple[str, str]


def print_rows(rows: Sequence[Row], console: Console, *, title: str) -> None:
    """Print a table on a terminal, and aligned lines elsewhere."""
    from rich.table import Table

    if not console.is_terminal:
        for name, value in rows:
            console.print(f"{name:16}{value}", highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _moved(copied: Copied) -> str:
    text = f"{copied.blocks:,} blocks, {format_size(copied.num_bytes)}"
    return f"{text}, {copied.gbps:.2f} GB/s while copying" if copied.gbps else text
