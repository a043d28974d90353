"""Decides which block is in which place of a path's data file, and which block makes room for the next one. Reads and
writes no file.

The file is cut into chunks. All places of a chunk have one length and one owner. A chunk moves to another length or
owner as a whole, so several lengths share one size, and the file is never larger than configured.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from kvstow_service.stores.disk.diskformat import PlaceKind, name_digests

OWNER_SECONDS = 3600.0
"""An owner that has neither read nor written for this many seconds has no share that others must leave to it."""

_NONE = -1
_NO_KIND: Final = PlaceKind("", "", 0)
_FREE, _TAKEN, _CACHED, _DIRTY = range(4)
"""States of a place. A free place holds zeros, or was never written. A taken one is being written. A dirty one may hold
bytes of a removed block, and is overwritten with zeros before it is used again."""


class BlockName(NamedTuple):
    """The name of a block on a path. `digest`: the 16-byte digest of its namespace and key. `namespace`: see
    `namespace_number`. `key_start`: the first 8 bytes of its key, as a number."""

    digest: bytes
    namespace: int
    key_start: int


class Assignment(NamedTuple):
    """Chunk `chunk` gets places of this kind. Records of the chunk with another generation mean nothing."""

    chunk: int
    kind: PlaceKind
    generation: int


class Place(NamedTuple):
    """Where a place is in the file: place `number` of chunk `chunk`, at byte `offset`."""

    chunk: int
    number: int
    offset: int
    generation: int


class TakenPlace(NamedTuple):
    """What `take` has found. `place`: None if there is none now. `num_evicted`: how many blocks have made room.
    `assign`: an assignment for the caller to carry out, which then calls `assigned`. `waits`: whether there will be a
    place as soon as that was called."""

    place: int | None
    num_evicted: int = 0
    assign: Assignment | None = None
    waits: bool = False


class Selection(NamedTuple):
    """The blocks that a purge removes. Pools with this `identity` have written them and, unless `namespace` is None, in
    this namespace. Unless `keys` is None, only these keys are removed. If there are `prefixes`, only keys that begin
    with one of them are; of blocks that are written, only the first 8 bytes of the keys are known. If a time is given,
    only blocks that were written, or last used, at this time or before are removed."""

    identity: str
    namespace: int | None = None
    keys: frozenset[bytes] | None = None
    prefixes: tuple[bytes, ...] = ()
    written_before: float | None = None
    used_before: float | None = None

    def takes_write(self, kind: PlaceKind, name: BlockName, key: bytes) -> bool:
        """Whether the purge removes this block, which is being written and so is younger than any age."""
        if self.written_before is not None or self.used_before is not None:
            return False
        if self.namespace not in (None, name.namespace) or self.identity != kind.identity:
            return False
        if self.keys is not None:
            return key in self.keys
        return not self.prefixes or key.startswith(self.prefixes)


def key_start(key: bytes) -> int:
    """Return the first 8 bytes of a key, as a number."""
    return int.from_bytes(key[:8].ljust(8, b"\0"), "big")


@dataclass(slots=True)
class _Chunk:
    """A chunk of the data file. `first`: the number of its first place; its places are numbered consecutively.
    `use_sum`: the sum of the times of last use of its places, where a place without a block counts 0. `busy`: how many
    of its places must stay for now. A chunk without a kind has no places."""

    number: int
    generation: int = 0
    kind: PlaceKind = _NO_KIND
    first: int = 0
    count: int = 0
    use_sum: float = 0.0
    busy: int = 0
    is_ready: bool = False


@dataclass(slots=True)
class _Group:
    """All places of a kind. `oldest` and `newest`: the ends of the order of use. `evictions`: how many blocks were
    evicted since the last decision whether another group should give it a chunk. `assigning`: how many of its chunks
    are being assigned."""

    kind: PlaceKind
    oldest: int = _NONE
    newest: int = _NONE
    free: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    evictions: int = 0
    assigning: int = 0


class FoundChunk(NamedTuple):
    """What the records of one chunk say. The arrays have one element for each block: `indices` of the places, `digests`
    (16 bytes each, in one piece), `namespaces`, `key_starts`, and the times of writing and of last use. `dirty`:
    indices of places that have to be overwritten."""

    assignment: Assignment
    indices: Any
    digests: bytes
    namespaces: Any
    key_starts: Any
    written_at: Any
    used_at: Any
    dirty: Any


class DiskPlaces:
    """The least recently used block of a kind makes room for the next one of that kind. Not locked.

    Chunks move between kinds so that all kinds together come near to one order of use. An owner with fewer chunks than
    an equal share takes some from an owner that has more. Otherwise, a kind takes a chunk from another kind if the
    places of that chunk were on average last used before the oldest block of the kind that needs room. So kinds that
    are not used any more lose their chunks without a further rule.

    Each call is O(blocks given), except `restore` and `select`, which are O(places), and `take`, which once for each
    chunk's worth of evictions is O(chunks).
    """

    def __init__(self, num_chunks: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._chunks = [_Chunk(number) for number in range(num_chunks)]
        self._idle = list(reversed(range(num_chunks)))
        self._groups: dict[PlaceKind, _Group] = {}
        self._of_owner: Counter[str] = Counter()
        self._active_at: dict[str, float] = {}
        self.index: dict[bytes, int] = {}
        """The place of each block that is found, by digest."""
        self.used_bytes = 0
        """The bytes of all places that hold a block."""
        # By number of the place:
        self._state = bytearray()
        self._chunk_of = array("i")
        self._before, self._after = array("i"), array("i")
        self._digests: list[bytes | None] = []
        self._namespaces, self._key_starts = array("Q"), array("Q")
        self._written_at, self._used_at = array("d"), array("d")
        self._readers: Counter[int] = Counter()
        self._ranges: dict[int, list[int]] = {}
        """Rows of numbers that no chunk uses now, as the first number of each row, by the length of the row."""

    # -- what there is --------------------------------------------------------------------------------------

    def fits(self, kind: PlaceKind) -> bool:
        return 0 < kind.place_bytes <= self.chunk_bytes

    def where(self, place: int) -> Place:
        chunk = self._chunks[self._chunk_of[place]]
        index = place - chunk.first
        offset = chunk.number * self.chunk_bytes + index * chunk.kind.place_bytes
        return Place(chunk.number, index, offset, chunk.generation)

    def cached_at(self, where: Place) -> int | None:
        """Return the number of the place that `where` describes. None if it holds no block, or if its chunk was given
        to another kind since."""
        chunk = self._chunks[where.chunk]
        place = chunk.first + where.number
        if chunk.generation != where.generation or not chunk.count or self._state[place] != _CACHED:
            return None
        return place

    def kind_of(self, place: int) -> PlaceKind:
        return self._chunks[self._chunk_of[place]].kind

    @property
    def size_bytes(self) -> int:
        return len(self._chunks) * self.chunk_bytes

    def select(self, selection: Selection) -> list[int]:
        """Return the places of all blocks that a purge removes."""
        chunks = [one.number for one in self._chunks if one.kind.identity == selection.identity]
        chosen = np.isin(np.frombuffer(self._chunk_of, np.int32), chunks)
        chosen &= np.frombuffer(self._state, np.uint8) == _CACHED
        namespaces = np.frombuffer(self._namespaces, np.uint64)
        if selection.namespace is not None:
            chosen &= namespaces == np.uint64(selection.namespace)
        if selection.prefixes:
            starts = np.frombuffer(self._key_starts, np.uint64)
            lowest = [key_start(prefix) for prefix in selection.prefixes]
            highest = [key_start(prefix.ljust(8, b"\xff")) for prefix in selection.prefixes]
            ranges = zip(lowest, highest, strict=True)
            chosen &= np.logical_or.reduce([(starts >= low) & (starts <= high) for low, high in ranges])
        if selection.written_before is not None:
            chosen &= np.frombuffer(self._written_at, np.float64) <= selection.written_before
        if selection.used_before is not None:
            chosen &= np.frombuffer(self._used_at, np.float64) <= selection.used_before
        if selection.keys is None:
            found: list[int] = np.flatnonzero(chosen).tolist()
            return found
        names = np.unique(namespaces[chosen]).tolist()
        digests = [digest for one in names for digest in name_digests(one, selection.keys)]
        return [place for one in digests if (place := self.index.get(one)) is not None and chosen[place]]

    def uses_of(self, chunk: int) -> Any:
        """Return the times of last use of all places of a chunk, as whole seconds."""
        one = self._chunks[chunk]
        return np.frombuffer(self._used_at, np.float64)[one.first : one.first + one.count].astype("<u4")

    # -- blocks ---------------------------------------------------------------------------------------------

    def take(self, kind: PlaceKind, now: float) -> TakenPlace:
        """Take a place for one more block of a kind that `fits`."""
        group = self._groups.setdefault(kind, _Group(kind))
        self._active_at[kind.owner] = now
        assign = None
        if not group.assigning and self._idle and len(group.free) <= self.chunk_bytes // kind.place_bytes // 2:
            assign = self._assign(self._idle.pop(), group)  # early, so that few writes wait for it
        if group.free:
            place = group.free.pop()
            self._begin(place)
            return TakenPlace(place, 0, assign)
        if group.assigning:
            return TakenPlace(None, 0, assign, waits=True)
        if (victim := self._chunk_for(group, now)) is not None:
            num_evicted = self._empty(victim)
            return TakenPlace(None, num_evicted, self._assign(victim.number, group), waits=True)
        oldest = group.oldest
        if oldest == _NONE:
            return TakenPlace(None)
        group.evictions += 1
        self._forget(oldest)
        self._begin(oldest)
        return TakenPlace(oldest, 1)

    def assigned(self, chunk: int) -> None:
        """Note that the places of a newly assigned chunk can be used now."""
        one = self._chunks[chunk]
        group = self._groups[one.kind]
        group.assigning -= 1
        group.free.extend(range(one.first + one.count - 1, one.first - 1, -1))
        one.is_ready = True

    def publish(self, place: int, name: BlockName, now: float) -> None:
        """Note that the block of a taken place is written. It is found from now on, and counts as used last."""
        chunk = self._chunks[self._chunk_of[place]]
        self._state[place] = _CACHED
        chunk.busy -= 1
        self._digests[place], self._namespaces[place], self._key_starts[place] = name
        self._written_at[place] = self._used_at[place] = now
        chunk.use_sum += now
        self.index[name.digest] = place
        self.used_bytes += chunk.kind.place_bytes
        self._append(self._groups[chunk.kind], place)

    def use(self, place: int, now: float) -> None:
        """Note that the block of a place was used."""
        chunk = self._chunks[self._chunk_of[place]]
        group = self._groups[chunk.kind]
        self._active_at[chunk.kind.owner] = now
        chunk.use_sum += now - self._used_at[place]
        self._used_at[place] = now
        if group.newest != place and place not in self._readers:
            self._unlink(group, place)
            self._append(group, place)

    def hold(self, place: int) -> None:
        """Note that the block of a place is being read, so the place has to stay as it is."""
        if place not in self._readers:
            chunk = self._chunks[self._chunk_of[place]]
            self._unlink(self._groups[chunk.kind], place)
            chunk.busy += 1
        self._readers[place] += 1

    def let_go(self, place: int) -> bool:
        """Note that a read has ended, or that the record of a removed block is dirty. Returns whether the place has to
        be overwritten now, because its block was removed."""
        self._readers[place] -= 1
        if self._readers[place]:
            return False
        del self._readers[place]
        chunk = self._chunks[self._chunk_of[place]]
        chunk.busy -= 1
        if self._state[place] == _DIRTY:  # which counts as busy, too
            return True
        self._append(self._groups[chunk.kind], place)
        return False

    def remove(self, place: int) -> None:
        """Remove the block of a place, because it was purged or is corrupt. It is held until its record is dirty; the
        last `let_go` says that it can be overwritten."""
        self._forget(place)
        self._chunks[self._chunk_of[place]].busy += 1
        self.abandon(place)

    def abandon(self, place: int) -> None:
        """Note that a taken place holds no block, but perhaps some of its bytes, so it has to be overwritten. It is
        held as after `remove`."""
        self._state[place] = _DIRTY
        if place not in self._readers:
            self._chunks[self._chunk_of[place]].busy += 1
        self._readers[place] += 1

    def clean(self, place: int) -> None:
        """Note that a dirty place was overwritten."""
        chunk = self._chunks[self._chunk_of[place]]
        chunk.busy -= 1
        self._state[place] = _FREE
        self._groups[chunk.kind].free.append(place)

    # -- a start --------------------------------------------------------------------------------------------

    def restore(self, found: Sequence[FoundChunk], generations: Mapping[int, int]) -> list[int]:
        """Take over what the records of this path say. Call this before all others. `generations`: the generations of
        all chunks that have ever had places. Returns the dirty places."""
        dirty: list[int] = []
        for number, generation in generations.items():
            if number < len(self._chunks):
                self._chunks[number].generation = generation
        for one in found:
            chunk = self._chunks[one.assignment.chunk]
            if self.fits(one.assignment.kind):
                dirty += self._restore_chunk(chunk, one)
        self._idle = [number for number in self._idle if self._chunks[number].kind == _NO_KIND]
        dirty += self._drop_doubles()
        for group in self._groups.values():
            self._link_all(group)
        return dirty

    def _restore_chunk(self, chunk: _Chunk, found: FoundChunk) -> list[int]:
        """Take over the records of a chunk. Returns its dirty places."""
        kind = found.assignment.kind
        group = self._groups.setdefault(kind, _Group(kind))
        self._set_kind(chunk, group)
        chunk.is_ready = True
        places = np.asarray(found.indices, np.int64) + chunk.first
        dirty = np.asarray(found.dirty, np.int64) + chunk.first
        states = np.frombuffer(self._state, np.uint8)
        states[places], states[dirty] = _CACHED, _DIRTY
        np.frombuffer(self._namespaces, np.uint64)[places] = found.namespaces
        np.frombuffer(self._key_starts, np.uint64)[places] = found.key_starts
        np.frombuffer(self._written_at, np.float64)[places] = found.written_at
        np.frombuffer(self._used_at, np.float64)[places] = found.used_at
        chunk.use_sum, chunk.busy = float(np.sum(found.used_at)), len(dirty)
        raw, numbers = found.digests, places.tolist()
        digests = [raw[at : at + 16] for at in range(0, len(raw), 16)]
        self.index.update(zip(digests, numbers, strict=True))
        for place, digest in zip(numbers, digests, strict=True):
            self._digests[place] = digest
        self.used_bytes += len(places) * kind.place_bytes
        free = np.flatnonzero(states[chunk.first : chunk.first + chunk.count] == _FREE)
        group.free.extend((free + chunk.first).tolist())
        gone: list[int] = dirty.tolist()
        return gone

    def _drop_doubles(self) -> list[int]:
        """Remove one of two places with the same block, which there may be after a power cut. Returns the removed
        places, which are dirty."""
        if len(self.index) == np.count_nonzero(np.frombuffer(self._state, np.uint8) == _CACHED):
            return []
        dropped = [
            place
            for place in np.flatnonzero(np.frombuffer(self._state, np.uint8) == _CACHED).tolist()
            if self.index.get(self._digests[place]) != place  # type: ignore[arg-type]
        ]
        for place in dropped:
            chunk = self._chunks[self._chunk_of[place]]
            chunk.use_sum -= self._used_at[place]
            chunk.busy += 1
            self._used_at[place], self._digests[place] = 0.0, None
            self._state[place] = _DIRTY
            self.used_bytes -= chunk.kind.place_bytes
        return dropped

    def _link_all(self, group: _Group) -> None:
        ranges = [np.arange(one.first, one.first + one.count) for one in map(self._chunks.__getitem__, group.chunks)]
        places = np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
        places = places[np.frombuffer(self._state, np.uint8)[places] == _CACHED]
        if not len(places):
            return
        ordered = places[np.argsort(np.frombuffer(self._used_at, np.float64)[places], kind="stable")]
        before, after = np.frombuffer(self._before, np.int32), np.frombuffer(self._after, np.int32)
        after[ordered[:-1]], before[ordered[1:]] = ordered[1:], ordered[:-1]
        before[ordered[0]] = after[ordered[-1]] = _NONE
        group.oldest, group.newest = int(ordered[0]), int(ordered[-1])

    # -- chunks ---------------------------------------------------------------------------------------------

    def _chunk_for(self, group: _Group, now: float) -> _Chunk | None:
        """Return the chunk of another group that this group should have, or None. It looks for one only if the group
        has no chunk, or has evicted a chunk's worth of blocks since the last time."""
        if group.chunks and group.evictions < self.chunk_bytes // group.kind.place_bytes:
            return None
        group.evictions = 0
        if (found := self._chunk_of_the_rich(group.kind.owner, now)) is not None:
            return found
        found = self._coldest(self._groups_to_ask(group, now))
        if found is None or not group.chunks:
            return found
        if group.oldest == _NONE or self._mean_use(found) >= self._used_at[group.oldest]:
            return None
        return found

    def _chunk_of_the_rich(self, owner: str, now: float) -> _Chunk | None:
        """Return a chunk of the owner with the most chunks, if this owner has less than its share and that owner has
        more than its own. Otherwise return None."""
        active, share = self._shares(owner, now)
        others = [one for one in self._of_owner if one != owner]
        if self._of_owner[owner] + 1 > share or not others:
            return None
        richest = max(others, key=self._of_owner.__getitem__)
        if richest in active and self._of_owner[richest] <= share:
            return None
        return self._coldest(one for one in self._groups.values() if one.kind.owner == richest)

    def _groups_to_ask(self, group: _Group, now: float) -> Iterator[_Group]:
        """Yield the groups that may lose a chunk to this one because their blocks are older."""
        active, share = self._shares(group.kind.owner, now)
        for one in self._groups.values():
            owner = one.kind.owner
            is_protected = owner != group.kind.owner and owner in active and self._of_owner[owner] <= share
            if one is not group and not is_protected:
                yield one

    def _shares(self, owner: str, now: float) -> tuple[set[str], float]:
        """Return the active owners, and how many chunks each of them and `owner` may have if all have an equal
        share."""
        active = {one for one, at in self._active_at.items() if now - at < OWNER_SECONDS and self._of_owner[one]}
        return active, len(self._chunks) / len(active | {owner})

    def _coldest(self, groups: Iterator[_Group]) -> _Chunk | None:
        chunks = (self._chunks[number] for group in groups for number in group.chunks)
        return min((one for one in chunks if one.is_ready and not one.busy), key=self._mean_use, default=None)

    @staticmethod
    def _mean_use(chunk: _Chunk) -> float:
        return chunk.use_sum / chunk.count

    def _assign(self, number: int, group: _Group) -> Assignment:
        chunk = self._chunks[number]
        chunk.generation += 1
        self._set_kind(chunk, group)
        group.assigning += 1
        return Assignment(number, group.kind, chunk.generation)

    def _set_kind(self, chunk: _Chunk, group: _Group) -> None:
        chunk.kind, chunk.is_ready, chunk.use_sum = group.kind, False, 0.0
        chunk.count = self.chunk_bytes // group.kind.place_bytes
        chunk.first = self._number_places(chunk.count)
        self._chunk_of[chunk.first : chunk.first + chunk.count] = array("i", [chunk.number]) * chunk.count
        group.chunks.append(chunk.number)
        self._of_owner[group.kind.owner] += 1

    def _empty(self, chunk: _Chunk) -> int:
        """Take a chunk without busy places from its group, and return how many blocks it had."""
        group = self._groups[chunk.kind]
        places = range(chunk.first, chunk.first + chunk.count)
        cached = [place for place in places if self._state[place] == _CACHED]
        for place in cached:
            self._forget(place)
        group.free = [place for place in group.free if place not in places]
        group.chunks.remove(chunk.number)
        self._of_owner[chunk.kind.owner] -= 1
        if not self._of_owner[chunk.kind.owner]:
            del self._of_owner[chunk.kind.owner]
        self._ranges.setdefault(chunk.count, []).append(chunk.first)
        chunk.kind = _NO_KIND
        return len(cached)

    def _number_places(self, count: int) -> int:
        rows = self._ranges.get(count)
        if rows:
            first = rows.pop()
            self._state[first : first + count] = bytes(count)
            return first
        first = len(self._state)
        self._state.extend(bytes(count))
        for links in (self._chunk_of, self._before, self._after):
            links.frombytes(bytes(4 * count))
        for values in (self._namespaces, self._key_starts, self._written_at, self._used_at):
            values.frombytes(bytes(8 * count))
        self._digests.extend([None] * count)
        return first

    # -- the order ------------------------------------------------------------------------------------------

    def _begin(self, place: int) -> None:
        self._state[place] = _TAKEN
        self._chunks[self._chunk_of[place]].busy += 1

    def _forget(self, place: int) -> None:
        """Take the block out of a place, which is free then."""
        chunk = self._chunks[self._chunk_of[place]]
        digest = self._digests[place]
        assert digest is not None
        if place not in self._readers:
            self._unlink(self._groups[chunk.kind], place)
        self._digests[place] = None
        self._state[place] = _FREE
        chunk.use_sum -= self._used_at[place]
        self._used_at[place] = 0.0
        self.used_bytes -= chunk.kind.place_bytes
        del self.index[digest]

    def _append(self, group: _Group, place: int) -> None:
        self._before[place], self._after[place] = group.newest, _NONE
        if group.newest == _NONE:
            group.oldest = place
        else:
            self._after[group.newest] = place
        group.newest = place

    def _unlink(self, group: _Group, place: int) -> None:
        before, after = self._before[place], self._after[place]
        if before == _NONE:
            group.oldest = after
        else:
            self._after[before] = after
        if after == _NONE:
            group.newest = before
        else:
            self._before[after] = before
