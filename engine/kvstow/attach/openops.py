"""The ops of an attached engine that have not ended, and how they end when the service disconnects."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstow.attach.calls import SettledOp
from kvstow.attach.hello import unique_id
from kvstow.messages import Completion, Direction, Mark, Op
from kvstow.results import Settled

_DISCONNECTED = "the node service disconnected before the store was complete"
"""The error of a store whose session has ended."""


@dataclass(slots=True)
class _OpenOp:
    """An op that some rank or the service has not finished."""

    op: Op
    service_id: int
    """The op's id in the service."""
    request_id: str
    pending: set[int]
    """The ranks that have not finished."""
    reading: set[int]
    """The ranks that may still read the blocks of a store."""
    error: str | None = None
    seconds: float = 0.0
    """The duration on the slowest rank."""
    is_final: bool = False
    """Whether the op's result has been put into `OpenOps.settled`."""

    def record(self, rank: int, completion: Completion) -> None:
        """Record what a rank has finished."""
        self.reading.discard(rank)
        if completion.mark != "source_free":
            self.pending.discard(rank)
            self.seconds = max(self.seconds, completion.seconds)
        if completion.mark == "failed":
            self.error = self.error or f"rank {rank}: {completion.error or 'failed'}"


class OpenOps:
    """Settles ops as early as is safe. Only one thread uses it. `start` is O(ranks), and `complete` is O(1).

    A load ends when all ranks have finished it, whatever the service does, because its bytes and slots are fixed. A
    store returns its blocks when all ranks have read them. Only the service can report that the blocks are stored, so
    a store fails if the service disconnects before that. Ids that the host sees are never reused, even in later
    sessions, so a late completion of an old session is never reported in a new one.
    """

    def __init__(self, num_ranks: int, *, replicated: bool = False) -> None:
        """If the ranks are `replicated`, only rank 0 stores."""
        self.num_ranks = num_ranks
        self._ranks = frozenset(range(num_ranks))
        self._storing = frozenset((0,)) if replicated else self._ranks
        self._number = 0
        self._last_count = 0
        self._open: dict[int, _OpenOp] = {}
        self._of_service: dict[int, _OpenOp] = {}
        """The ops of the current session, by their ids in the service."""
        self._num_final = 0
        """How many of the open ops are final."""
        self.settled: deque[Settled] = deque()
        """Results that the host has not taken yet."""
        self.stale_completions = 0
        """How many completions came for ops that had ended, or that the rank had finished already."""
        self.moved_blocks: Counter[Direction] = Counter()
        """The blocks of ops that are done, by direction."""
        self.moved_seconds: defaultdict[Direction, float] = defaultdict(float)
        """The duration of these ops in seconds, each on its slowest rank."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_awaited(self) -> int:
        """How many ops the host is still waiting for."""
        return len(self._open) - self._num_final

    def num_blocks(self, direction: Direction) -> int:
        """Return the blocks of all open ops in this direction. O(open ops)."""
        return sum(len(entry.op.blocks) for entry in self._open.values() if entry.op.direction == direction)

    def begin_session(self, number: int) -> None:
        """Begin the session with this number. Ops that start from now on belong to it."""
        self._number = number

    def start(
        self, direction: Direction, blocks: tuple[int, ...], slots: tuple[int, ...], service_id: int, request_id: str
    ) -> Op:
        """Open an op that the service has granted. Returns it with an id of this engine."""
        self._last_count += 1
        op = Op(unique_id(self._number, self._last_count), direction, blocks, slots)
        ranks = self._storing if direction == "store" else self._ranks
        entry = _OpenOp(op, service_id, request_id, set(ranks), set(ranks) if direction == "store" else set())
        self._open[op.op_id] = self._of_service[service_id] = entry
        return op

    def service_id(self, op_id: int) -> int | None:
        """The id in the service of an op; None for an op that has ended, or is of an earlier session."""
        entry = self._open.get(op_id)
        return entry.service_id if entry is not None and self._is_current(entry) else None

    def complete(self, rank: int, completion: Completion) -> Completion | None:
        """Take a completion of `rank`. Returns it with the op's id in the service. Returns None if it is late, repeated
        or of an earlier session, so that it must not be sent to the service."""
        entry = self._open.get(completion.op_id)
        if entry is None or rank not in (entry.reading if completion.mark == "source_free" else entry.pending):
            self.stale_completions += 1
            return None
        is_current = self._is_current(entry)
        was_reading = bool(entry.reading)
        entry.record(rank, completion)
        if entry.is_final:
            self._forget_if_over(entry)
        elif not entry.pending and (entry.op.direction == "load" or entry.error or not is_current):
            self._end(entry, "failed" if entry.error else "done")
        elif was_reading and not entry.reading:
            self._settle(entry, "source_free")
        return replace(completion, op_id=entry.service_id) if is_current else None

    def take_results(self, results: Sequence[SettledOp]) -> None:
        """Take results that the service has sent for ops of the current session."""
        for result in results:
            entry = self._of_service.get(result.op_id)
            if entry is None or entry.is_final:
                continue
            if result.mark == "source_free":
                if entry.reading:
                    entry.reading.clear()
                    self._settle(entry, "source_free")
                continue
            entry.error = result.error or entry.error
            self._end(entry, result.mark)

    def end_session(self) -> None:
        """End the session. The service sends nothing more about its ops, so stores fail. O(open ops)."""
        self._of_service.clear()
        for entry in list(self._open.values()):
            if entry.op.direction == "store":
                entry.error = entry.error or _DISCONNECTED
                if not entry.pending:
                    self._end(entry, "failed")

    def _is_current(self, entry: _OpenOp) -> bool:
        return self._of_service.get(entry.service_id) is entry

    def _end(self, entry: _OpenOp, mark: Mark) -> None:
        entry.is_final = True
        self._num_final += 1
        self._settle(entry, mark)
        self._forget_if_over(entry)

    def _forget_if_over(self, entry: _OpenOp) -> None:
        """Forget the op if all ranks have finished it. Until then `complete` passes completions on to the service even
        if the op is final, because the last completion of an abandoned store ends the quarantine of its slots."""
        if entry.pending:
            return
        del self._open[entry.op.op_id]
        self._num_final -= 1
        if self._is_current(entry):
            del self._of_service[entry.service_id]

    def _settle(self, entry: _OpenOp, mark: Mark) -> None:
        op = entry.op
        error = entry.error if mark == "failed" else None
        if mark == "done":
            self.moved_blocks[op.direction] += len(op.blocks)
            self.moved_seconds[op.direction] += entry.seconds
        self.settled.append(Settled(op.op_id, op.direction, mark, entry.request_id, op.blocks, error))
