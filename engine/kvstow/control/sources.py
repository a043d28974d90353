"""By whom a pool is used: the models, adapters, salts and sessions with most hits, stores and slots, in bounded
memory."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvstow.source import Source
from kvstow.status import SOURCE_KINDS, SourceKind, SourceOrder, SourceStatus

MOST_SOURCES = 20
"""Of each kind, that are shown."""
KEY_BYTES = 16
_KEPT = 256
"""Of each kind. A source with more than this part of all blocks is among them."""
_MOST_FOLLOWED = 4096
"""Slots whose source is known. In larger pools, these are every third, ninth and so on."""


class Usage:
    """Blocks of one source. `missed`: at most so many more were looked up or stored before it was counted."""

    __slots__ = ("hits", "looked_up", "missed", "stored")

    def __init__(self, missed: int) -> None:
        self.looked_up = self.hits = self.stored = 0
        self.missed = missed

    @property
    def most(self) -> int:
        """No more blocks than these were looked up or stored."""
        return self.looked_up + self.stored + self.missed


class TopSources:
    """The sources of one kind with most blocks, out of any number. Amortized O(1) for each call.

    This is Space-Saving (Metwally, Agrawal and El Abbadi, 2005) in batches: when there are twice as many as are kept,
    those with most blocks stay. One that comes then may have been dropped before, with no more blocks than the largest
    one that was dropped. With N blocks in all, that is N / 256 at most.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._dropped = 0
        self._usage: dict[str, Usage] = {}

    def of(self, name: str) -> Usage:
        found = self._usage.get(name)
        if found is None:
            if len(self._usage) >= 2 * self._kept:
                self._drop_small()
            found = self._usage[name] = Usage(self._dropped)
        return found

    def _drop_small(self) -> None:
        largest = sorted(self._usage.items(), key=lambda item: item[1].most, reverse=True)
        self._dropped = largest[self._kept][1].most
        self._usage = dict(largest[: self._kept])

    @property
    def most_missed(self) -> int:
        """No source that is not kept has more blocks."""
        return self._dropped

    def rows(self) -> list[tuple[str, Usage]]:
        return list(self._usage.items())


class Sources:
    """The sources of a pool. Used with the pool's lock held. Amortized O(1) for each request and each run of its slots.

    A block's key covers the model, the adapter and the salt, so every request that stores it has the same ones. The
    first request that uses a block counts as the one that has stored it, and the last one as its owner.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        """Of the digests. Engines of the pool get it, and nobody else."""
        self._tops: Mapping[SourceKind, TopSources] = {kind: TopSources() for kind in SOURCE_KINDS}
        self._stride = 1
        self._owners: dict[int, tuple[str, Source]] = {}
        """Who has last used the block in a slot, of every `_stride`th one."""

    def count_lookup(self, model: str, source: Source, queried: int, hits: int) -> None:
        for usage in self._usages(model, source):
            usage.looked_up += queried
            usage.hits += hits

    def count_use(self, model: str, source: Source, runs: Sequence[Sequence[int]], new: int) -> None:
        """A request has used the blocks in these slots, of which nobody had used `new` ones before."""
        if new:
            for usage in self._usages(model, source):
                usage.stored += new
        owner = (model, source)
        for run in runs:
            if followed := self._followed(run):
                self._owners.update(dict.fromkeys(followed, owner))

    def forget(self, slots: Sequence[int]) -> None:
        """These slots, in ascending order, have new content, which nobody has used yet."""
        if slots and slots[-1] - slots[0] == len(slots) - 1:
            slots = range(slots[0], slots[-1] + 1)
        for slot in self._followed(slots):
            self._owners.pop(slot, None)

    def _followed(self, slots: Sequence[int]) -> Sequence[int]:
        stride = self._stride
        if stride == 1:
            return slots
        if isinstance(slots, range):
            return range(-(-slots.start // stride) * stride, slots.stop, stride)
        return [slot for slot in slots if not slot % stride]

    def _usages(self, model: str, source: Source) -> Iterator[Usage]:
        for kind, name in names_of(model, source):
            yield self._tops[kind].of(name)

    def resize(self, num_slots: int) -> None:
        """The pool has so many slots. The stride never falls, as nothing is known of the slots between."""
        while num_slots > _MOST_FOLLOWED * self._stride:
            self._stride *= 3
            self._owners = {slot: owner for slot, owner in self._owners.items() if slot % self._stride == 0}

    def owners(self) -> list[tuple[int, tuple[str, Source]]]:
        """Slots, and who has last used the blocks that they hold or held. O(slots that are followed)."""
        return list(self._owners.items())

    def statuses(self, owners: Sequence[tuple[str, Source]], by: SourceOrder, most: int) -> list[SourceStatus]:
        """The `most` sources of each kind. `owners`: of the slots that are followed and hold a block."""
        slots = Counter(one for owner in owners for one in names_of(*owner))
        found: list[SourceStatus] = []
        for kind, top in self._tops.items():
            usage = dict(top.rows())
            names = [*usage, *(name for of_kind, name in slots if of_kind == kind and name not in usage)]
            rows = [
                _status(kind, name, usage.get(name, Usage(top.most_missed)), slots[kind, name] * self._stride)
                for name in names
            ]
            rows.sort(key=lambda row: (-getattr(row, _FIELDS[by]), row.source))
            found += rows[:most]
        return found


_FIELDS: Mapping[SourceOrder, str] = {"hits": "hit_blocks", "stores": "stored_blocks", "slots": "slots"}


def names_of(model: str, source: Source) -> Iterator[tuple[SourceKind, str]]:
    if model:
        yield "model", model
    if source.lora:
        yield "lora", source.lora.hex()
    if source.salt:
        yield "salt", source.salt.hex()
    if source.session:
        yield "session", source.session.hex()


def _status(kind: SourceKind, name: str, usage: Usage, slots: int) -> SourceStatus:
    return SourceStatus(
        kind=kind,
        source=name,
        looked_up_blocks=usage.looked_up,
        hit_blocks=usage.hits,
        stored_blocks=usage.stored,
        slots=slots,
        missed_blocks=usage.missed,
    )
