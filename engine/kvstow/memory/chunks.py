"""Chunks: the units in which a pool's slots are populated and registered, and how a pool grows by them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

from kvstow.errors import PinError
from kvstow.memory.hoststeps import CallQueue, RegisterCall
from kvstow.memory.pinning import Pace, PacedRegistrar
from kvstow.memory.region import HUGE_PAGE_BYTES, PAGE_BYTES, bytes_by_node, round_up

NODE_STEP = 16 << 20  # bytes between two samples of the NUMA node: sampling holds the GIL

logger = logging.getLogger("kvstow.pool")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots `first_slot` up to, but not including, `end_slot`: whole pages, `num_bytes` from `offset` in the region."""

    first_slot: int
    end_slot: int
    offset: int
    num_bytes: int

    @property
    def end_offset(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class PinnedChunks:
    """The pinned chunks: `last` on top of those `below`. Immutable: the pool creates the next value before it registers
    a chunk and assigns it afterwards, so no error can occur between registering a chunk and recording it.

    `numa_bytes`: the memory of all of them by NUMA node.
    """

    last: Chunk
    below: PinnedChunks | None
    count: int
    numa_bytes: Counter[int]

    @classmethod
    def on(cls, below: PinnedChunks | None, chunk: Chunk, numa_bytes: Counter[int]) -> PinnedChunks:
        if below is None:
            return cls(chunk, None, 1, numa_bytes)
        return cls(chunk, below, below.count + 1, below.numa_bytes + numa_bytes)


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Chunks of whole slots that share no page of `PAGE_BYTES`, so that each can be registered and given back alone.

    `slot_stride`: bytes from one slot to the next. It is `slot_bytes`, except for sizes that rarely meet a page
    boundary: those are padded, by at most 8 KiB per `chunk_bytes` or a page per slot. `unit_slots`: chunks end at a
    multiple of it, or at the end of the region; those short of the target at a multiple of `step_slots`."""

    slot_stride: int
    unit_slots: int
    step_slots: int
    max_slots: int

    @classmethod
    def of(cls, slot_bytes: int, max_slots: int, chunk_bytes: int) -> ChunkGrid:
        """A grid for chunks of about `chunk_bytes` or more."""
        return cls.of_stride(_stride(slot_bytes, chunk_bytes), max_slots, chunk_bytes)

    @classmethod
    def of_stride(cls, stride: int, max_slots: int, chunk_bytes: int) -> ChunkGrid:
        """As `of`, for slots without more padding. Where slots rarely meet a page boundary, chunks are larger."""
        unit = _slots_between_boundaries(stride, PAGE_BYTES)
        huge_unit = _slots_between_boundaries(stride, HUGE_PAGE_BYTES)
        return cls(stride, unit, huge_unit if huge_unit * stride <= chunk_bytes else unit, max_slots)

    @property
    def region_bytes(self) -> int:
        return self.end_offset(self.max_slots)

    def end_offset(self, target: int) -> int:
        """Total bytes of the chunks that hold `target` slots."""
        return round_up(self._end_slot(target) * self.slot_stride, PAGE_BYTES)

    def next_chunk(self, covered: int, target: int, num_bytes: int) -> Chunk:
        """The chunk after the first `covered` slots, for a pool of `target` slots (`covered` < `target`): at most
        `num_bytes`, or the smallest possible chunk."""
        end = min(self._next_step(covered, num_bytes), self._end_slot(target))
        offset = covered * self.slot_stride
        return Chunk(covered, end, offset, round_up(end * self.slot_stride, PAGE_BYTES) - offset)

    def count(self, covered: int, target: int, num_bytes: int) -> int:
        """The number of chunks of `num_bytes` from `covered` to `target` slots."""
        if covered >= target:
            return 0
        rest = max(0, target - self._next_step(covered, num_bytes))
        return 1 + -(-rest // self._chunk_slots(num_bytes))

    def _chunk_slots(self, num_bytes: int) -> int:
        return max(self.step_slots, num_bytes // self.slot_stride // self.step_slots * self.step_slots)

    def _next_step(self, covered: int, num_bytes: int) -> int:
        return (covered + self._chunk_slots(num_bytes)) // self.step_slots * self.step_slots

    def _end_slot(self, target: int) -> int:
        return min(round_up(target, self.unit_slots), self.max_slots)


def _slots_between_boundaries(stride: int, boundary: int) -> int:
    """The least number of slots whose bytes are a multiple of `boundary`."""
    return boundary // gcd(stride, boundary)


def _stride(slot_bytes: int, chunk_bytes: int) -> int:
    """The least padding that makes slots meet a page boundary at least once in `chunk_bytes`."""
    alignment = 1
    stride = slot_bytes
    while alignment < PAGE_BYTES and _slots_between_boundaries(stride, PAGE_BYTES) * stride > chunk_bytes:
        alignment *= 2
        stride = round_up(slot_bytes, alignment)
    return stride


class SlotMemory(ABC):
    """Where the bytes of chunks are. Each step either succeeds or is undone completely.

    The pinning thread calls everything, with three exceptions: the host's thread may call `register`; a thread that
    populates may call `commit`, after the pinning thread has called it once; `close` comes when all other calls have
    ended. Chunks that follow each other may be committed and decommitted as one.
    """

    numa_notice: str | None = None
    """A sentence for people if memory cannot be bound to the node, else None."""

    def __init__(self, paced: PacedRegistrar) -> None:
        self.resident_bytes = 0
        self._paced = paced

    @abstractmethod
    def commit(self, chunk: Chunk) -> None:
        """Make the chunk's bytes present. Raises `PinError`."""

    @abstractmethod
    def decommit(self, chunk: Chunk) -> None:
        """Give the chunk's memory back."""

    @abstractmethod
    def address_of(self, chunk: Chunk) -> int: ...

    @abstractmethod
    def close(self) -> None:
        """Give all memory and the address space back; idempotent."""

    def bytes_by_node(self, chunk: Chunk) -> Counter[int]:
        """A committed chunk's bytes by NUMA node."""
        return bytes_by_node(self.address_of(chunk), chunk.num_bytes, NODE_STEP)

    def register(self, chunk: Chunk) -> None:
        """Pin a committed chunk, on the calling thread. Raises `PinError`; the chunk is then not pinned."""
        self._paced.registrar.register(self.address_of(chunk), chunk.num_bytes)

    def unregister(self, chunk: Chunk) -> None:
        """Undo `register`, at the pace. Raises `PinError`; the chunk is then still pinned."""
        self._paced.unregister(self.address_of(chunk), chunk.num_bytes)

    def unregister_at_close(self, chunk: Chunk) -> None:
        """Undo `register` on the calling thread. Logs an error instead of raising it, so that the caller goes on to the
        other chunks."""
        try:
            self._paced.registrar.unregister(self.address_of(chunk), chunk.num_bytes)
        except Exception as error:  # noqa: BLE001
            logger.warning("could not unregister slots %d-%d: %s", chunk.first_slot, chunk.end_slot - 1, error)


class Populating:
    """Populates chunks on a thread of its own, which starts with the first ones. Used by one other thread, the pinning
    thread, which calls `close` last."""

    def __init__(self, commit: Callable[[Sequence[Chunk]], list[Chunk]]) -> None:
        """`commit(chunks)` returns those that it has populated."""
        self._commit = commit
        self._thread: ThreadPoolExecutor | None = None
        self._chunks: Future[list[Chunk]] | None = None
        self._has_no_thread = False

    @property
    def is_under_way(self) -> bool:
        """Whether chunks have been begun and not taken."""
        return self._chunks is not None

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Populate these. None may be under way. If the process can start no thread, this call populates them itself,
        and raises what `commit` raises."""
        assert self._chunks is None
        if not self._has_no_thread:
            thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="kvstow-ahead")
            try:
                self._chunks = thread.submit(self._commit, chunks)
                self._thread = thread
                return
            except RuntimeError as error:
                self._has_no_thread = True
                logger.warning("memory is not populated ahead, so pinning takes longer: %s", error)
        done = Future[list[Chunk]]()
        done.set_result(self._commit(chunks))
        self._chunks = done

    def take(self, *, wait: bool) -> list[Chunk]:
        """The chunks that have been populated since the last time; none if they are not finished, unless `wait`. Raises
        what `commit` raised."""
        chunks = self._chunks
        if chunks is None or not (wait or chunks.done()):
            return []
        self._chunks = None
        return chunks.result()

    def close(self) -> list[Chunk]:
        """End the thread. The chunks that have been populated and were not taken. Raises what `commit` raised."""
        try:
            return self.take(wait=True)
        finally:
            if self._thread is not None:
                self._thread.shutdown()


_REFILL = 3  # more chunks are populated when a third of those ahead are left: 160 ms of calls beside steps of 20 ms


class Growth:
    """Chunks on their way into a pool. They are planned, populated, and registered, in the order of their slots.

    The pinning thread uses it, and calls `end` last. It populates chunks here or, beside an idle host, on another
    thread. Their register calls wait in `queue`, from which the host's thread takes some; any thread may hold or stop
    the queue.
    """

    def __init__(
        self,
        pinned: PinnedChunks | None,
        plan: Callable[[int, int], list[Chunk]],
        *,
        memory: SlotMemory,
        paced: PacedRegistrar,
        pace: Pace,
        is_host_idle: Callable[[], bool],
    ) -> None:
        """`pinned`: what the pool has already. `plan(covered, number)` names up to `number` chunks to populate after
        the first `covered` slots, which follow each other in memory; none if there is no more to do for now."""
        self.queue = CallQueue()
        self._before = pinned
        self._after_call: list[PinnedChunks] = []
        """What is pinned after each call of the queue."""
        self._plan, self._memory, self._paced, self._pace = plan, memory, paced, pace
        self._is_host_idle = is_host_idle
        self._populating = Populating(partial(self._commit, is_optional=True))

    @property
    def pinned(self) -> PinnedChunks | None:
        """What the pool has, with what is registered by now."""
        made = self.queue.made
        return self._after_call[made - 1] if made else self._before

    @property
    def is_used_up(self) -> bool:
        """Whether all that has been planned is registered."""
        return self.queue.made == len(self._after_call) and not self._populating.is_under_way

    def populate_ahead(self) -> int | None:
        """Populate more chunks if few of those that are have yet to be registered: on this thread, or beside the
        register calls of an idle host. Returns after how many calls it is to be called again; None if there is nothing
        to register. Raises `PinError` if the next chunk cannot be populated."""
        most = self._pace.chunks_ahead
        refill_at = most // _REFILL
        while True:
            self._add(self._populating.take(wait=self.queue.made == len(self._after_call)))
            pending = len(self._after_call) - self.queue.made
            is_idle = self._is_host_idle()
            if pending > (most - refill_at if is_idle else refill_at):
                return len(self._after_call) - refill_at
            if self._populating.is_under_way:
                return len(self._after_call)
            chunks = self._next_chunks(most - pending)
            if chunks and is_idle and pending:
                self._populating.begin(chunks)
                return len(self._after_call)
            if not chunks or not (chunks := self._commit(chunks, is_optional=pending > 0)):
                return len(self._after_call) if pending else None
            self._add(chunks)
            if not is_idle:
                return len(self._after_call) - refill_at

    def end(self) -> None:
        """Give back what is populated and not registered. The queue has been settled."""
        rest = [chunks.last for chunks in self._after_call[self.queue.made :]]
        try:
            rest += self._populating.close()
        finally:
            for chunk in reversed(rest):  # one by one: they may lie in several extents
                self._memory.decommit(chunk)

    def _next_chunks(self, most: int) -> list[Chunk]:
        top = self._after_call[-1] if self._after_call else self._before
        # The first ones alone, so that some slots can be used soon.
        return self._plan(top.last.end_slot if top else 0, min(max(1, len(self._after_call)), most))

    def _add(self, chunks: Sequence[Chunk]) -> None:
        """Let these, which are populated, be registered."""
        if not chunks:
            return
        top, more = self._after_call[-1] if self._after_call else self._before, []
        try:
            for chunk in chunks:
                top = PinnedChunks.on(top, chunk, self._memory.bytes_by_node(chunk))
                more.append(top)
            self._after_call.extend(more)
        except BaseException:
            self._memory.decommit(_span(chunks))
            raise
        self.queue.add([RegisterCall(partial(self._memory.register, chunk), chunk.num_bytes) for chunk in chunks])

    def _commit(self, chunks: Sequence[Chunk], *, is_optional: bool) -> list[Chunk]:
        """Commit all of them, or else the first one; which of them it did. None only if `is_optional`: then there are
        others to register before this must raise."""
        for tried in (chunks, chunks[:1]):
            try:
                with self._paced.populating():
                    self._memory.commit(_span(tried))
            except PinError:
                if len(tried) == 1 and not is_optional:
                    raise
            else:
                return list(tried)
        return []


def _span(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks that follow each other in memory, as one."""
    first, last = chunks[0], chunks[-1]
    return replace(first, end_slot=last.end_slot, num_bytes=last.end_offset - first.offset)
