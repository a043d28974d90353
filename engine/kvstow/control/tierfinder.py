"""What a request can have of the pool, of fetches under way and of the store together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from kvstow.control.tierfetches import TierFetches
from kvstow.control.tierneeds import NOTHING, Found, Needed, Needs
from kvstow.control.tiertraffic import TierTraffic
from kvstow.control.tierwait import TierWait
from kvstow.tier.lookups import LookupTable


class TierFinder:
    """Finds what the pool, fetches under way and the store have together. Used by the thread of the host."""

    def __init__(self, traffic: TierTraffic, fetches: TierFetches, table: LookupTable) -> None:
        self._traffic, self._fetches, self._table = traffic, fetches, table

    def find(self, wait: TierWait) -> Found | None:
        """What the request can have; None: not known yet, and the store is asked."""
        needs = wait.needs
        found = self._leading(wait) if needs is None else self._needed(wait, needs)
        if found is not None and wait.inquiry is not None:
            self._table.drop(wait.inquiry)
        return found

    def _leading(self, wait: TierWait) -> Found | None:
        """The keys from `wait.first` on that the pool, fetches under way and the store have; None: not known yet."""
        inquiry, version = wait.inquiry, self._table.version
        if inquiry is not None and inquiry.is_open and version == wait.version:
            return None
        wait.version = version
        end = self._end_of(wait)
        if end is None:
            return None
        return Found(wait.keys[wait.first : end], end - wait.first, end - wait.first)

    def _needed(self, wait: TierWait, needs: Needs) -> Found | None:
        """What a request needs of several groups for the longest hit that the pool, fetches under way and the store
        give together, and how much longer it is than that of the pool alone; None: not known yet. O(keys) when the
        request comes and when the store has answered, and O(keys log keys) where the pool is short of slots."""
        if wait.inquiry is None:
            if needs(self._traffic.visible).blocks == needs.most:
                return NOTHING
            absent = [key for key in self._traffic.absent(wait.keys) if key not in self._fetches]
            if None in self._table.known(absent):
                wait.inquiry = self._table.want(absent, 0)
                return None
        elif wait.inquiry.is_open:
            return None
        pool = needs(self._traffic.visible)
        longest = self._longest(needs, pool.blocks)
        saved = longest.blocks - pool.blocks
        if saved <= 0:
            return NOTHING
        return Found(longest.keys, saved, len(set(longest.keys).difference(pool.keys)))

    def _longest(self, needs: Needs, least: int) -> Needed:
        """The longest hit that the three give together and that the pool has room for; if none is longer than `least`
        blocks, a shorter one. Bisects, so it may miss a longer hit that needs fewer slots, as with chunked attention.
        """
        longest = needs(self._has)
        if longest.blocks <= least or self._traffic.has_room(longest.keys):
            return longest
        longest, most = Needed((), 0), longest.blocks - 1
        while least < most:
            middle = (least + most + 1) // 2
            hit = needs(self._has, middle)
            if self._traffic.has_room(hit.keys):
                longest, least = hit, middle
            else:
                most = hit.blocks - 1
        return longest

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether the pool, a fetch under way or the store has it. What the store has does not count
        while an engine stores the same key, because a fetch cannot fill that slot."""
        fetched = set(self._traffic.absent(keys))
        return [
            visible or key in self._fetches or (known is True and key in fetched)
            for key, visible, known in zip(keys, self._traffic.visible(keys), self._table.known(keys), strict=True)
        ]

    def _end_of(self, wait: TierWait) -> int | None:
        """How many leading keys the pool, fetches under way and the store have; None: not known yet, and the store is
        asked about the rest. Of those, the pool has `wait.first`. Each look continues where one of the three ends:
        O(keys that they have)."""
        keys = wait.keys
        wait.first = at = self._traffic.visible_until(keys, wait.first).end
        while at < len(keys):
            begun = at
            at += len(list(takewhile(self._fetches.__contains__, islice(keys, at, None))))
            known = self._table.present_until(keys, at)
            reach = self._traffic.visible_until(keys, known.end)
            at = reach.end
            if at > begun:
                continue
            if known.is_final or reach.is_filling:
                return at
            if wait.inquiry is None or not wait.inquiry.is_open:
                wait.inquiry = self._table.want(keys, at)
            return None
        return at
