"""Descriptions of blocks for KV events: the blocks of running requests, and of earlier requests as long as the GPU may
still cache them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice, repeat
from typing import Any, NamedTuple

import msgspec

from kvstow.descriptions import TOKEN_BYTES, BlockDescription
from kvstow.keys import GROUP_BYTES
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

_FORGOTTEN_SHARE = 16
"""When the limit is exceeded, a sixteenth of all blocks is forgotten at once, so that this is seldom necessary."""


class BlockPlace(NamedTuple):
    """A block of a request, by its key, group and number."""

    key: bytes
    group: KVGroup
    number: int


ExtraKeys = Callable[[Any, int, int], Any]
"""Returns what the hash of a block of vLLM's request covers in addition to its tokens, given the request and the
block's first token and end."""


class KnownBlocks:
    """Describes blocks by their keys. Used by the scheduler's thread.

    A block that is being stored is often no longer a block of a running request: lazy stores and the backlog find it in
    the GPU's cache, where only its hash is known. So a description is made while the request is there, at the latest
    when the request ends, and the descriptions of the `most` latest blocks are kept.
    """

    def __init__(
        self, groups: KVGroups, requests: Mapping[str, TrackedRequest], most: int, extra_keys: ExtraKeys
    ) -> None:
        """`requests`: the requests that vLLM has, by name; owned by the caller. `most`: how many descriptions are kept.
        Blocks of the requests that ended first are forgotten first."""
        self._groups, self._requests, self._most, self._extra_keys = groups, requests, most, extra_keys
        first = groups.groups[0]
        self._hash_tokens = first.block_tokens // first.hashes_per_block
        self._known: dict[bytes, BlockDescription] = {}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes) -> BlockDescription | None:
        return self._known.get(key)

    def get_all(self, keys: Iterable[bytes]) -> list[BlockDescription | None]:
        return [*map(self._known.get, keys)]

    def renew(self, keys: Iterable[bytes]) -> list[BlockDescription | None]:
        """Return the descriptions of blocks that are being stored, and let them count as the newest, because they are
        needed when the blocks become visible."""
        known = self._known
        found = [known.pop(key, None) for key in keys]
        known.update([(key, each) for key, each in zip(keys, found, strict=True) if each is not None])
        return found

    def follow(self, tracked: TrackedRequest, end: int | None = None) -> None:
        """Describe the request's blocks of its first `end` tokens, or all of them, as far as they have keys. Each block
        is described once."""
        if not tracked.has_keys:
            return
        num_tokens = len(tracked.request.block_hashes) * self._hash_tokens
        end = num_tokens if end is None else min(end, num_tokens)
        for group in self._groups.groups:
            first, last = tracked.described_tokens // group.block_tokens, end // group.block_tokens
            if first < last:
                self._describe(tracked, group, first, tracked.keys(group, first, last))
        tracked.described_tokens = max(tracked.described_tokens, end)

    def keep(self, tracked: TrackedRequest) -> None:
        """Make all blocks of a request that ends, or loses its GPU blocks, the latest, because the GPU evicts them
        after those of older requests. O(its blocks)."""
        self.follow(tracked)
        known = self._known
        for group in self._groups.groups:
            for key in tracked.keys(group, 0, tracked.described_tokens // group.block_tokens):
                if (description := known.pop(key, None)) is not None:
                    known[key] = description

    def follow_all(self, keys: Iterable[bytes]) -> None:
        """Describe the blocks with these keys, as far as a running request has them. This cannot wait for the end of
        the request: a sliding window gives blocks back before that, and recurrent states are stored before that.
        O(requests) if one of the blocks is unknown."""
        if any(key not in self._known for key in keys):
            for tracked in self._requests.values():
                self.follow(tracked)

    def places(self, tracked: TrackedRequest, start: int, end: int, but_for: Set[bytes]) -> list[BlockPlace]:
        """Return the blocks that a load of the tokens `start` to `end` brings (`KVGroups.places`), as far as they have
        keys, except for the blocks with the keys `but_for`."""
        found: list[BlockPlace] = []
        for group in self._groups.groups:
            first = max(start // group.block_tokens, group.first_block(end))
            keys = tracked.keys(group, first, -(-end // group.block_tokens))
            found += [BlockPlace(key, group, at) for at, key in enumerate(keys, first) if key not in but_for]
        return found

    def describe_places(self, tracked: TrackedRequest, places: Sequence[BlockPlace]) -> None:
        """Describe these blocks of a request."""
        for key, group, number in places:
            if key not in self._known:
                self._describe(tracked, group, number, [key])

    def _describe(self, tracked: TrackedRequest, group: KVGroup, first: int, keys: Sequence[bytes]) -> None:
        """Describe the group's blocks from number `first` on, as far as they are not known, and make all of them the
        latest."""
        known = self._known
        found = [known.pop(key, None) for key in keys]
        if None in found:
            made = self._make(tracked, group, first, keys)
            found = [old or new for old, new in zip(found, made, strict=True)] if any(found) else made
        known.update([(key, each) for key, each in zip(keys, found, strict=True) if each is not None])
        if len(known) > self._most:
            for key in list(islice(known, len(known) - self._most + self._most // _FORGOTTEN_SHARE)):
                del known[key]

    def _make(
        self, tracked: TrackedRequest, group: KVGroup, first: int, keys: Sequence[bytes]
    ) -> list[BlockDescription | None]:
        """Describe the group's blocks from number `first` on: with None for a block that cannot be described."""
        request: Any = tracked.request
        size, step, hashes = group.block_tokens, group.hashes_per_block, request.block_hashes
        starts = range(first * size, (first + len(keys)) * size, size)
        tokens = array("I", request.all_token_ids[starts.start : starts.stop]).tobytes()
        width = TOKEN_BYTES * size
        of_blocks = [tokens[at : at + width] for at in range(0, width * len(keys), width)]
        ends = hashes[(first + 1) * step - 1 : (first + len(keys)) * step : step]
        parents = [hashes[first * step - 1] if first else b"", *ends[:-1]]
        lora, session_id = request.lora_request, getattr(request, "session_id", None)  # vLLM 0.30 has sessions
        lora_id, lora_name, own = None, None, [b""] * len(keys)
        if lora is not None:
            lora_id, lora_name = lora.adapter_id, lora.name
            own = [b"" if key[GROUP_BYTES:] == end else end for key, end in zip(keys, ends, strict=True)]
        extra = [self._packed(request, start, start + size) for start in starts]
        shared = map(repeat, (lora_id, lora_name, session_id))
        made = map(BlockDescription, of_blocks, parents, own, extra, *shared)
        return list(made) if None not in extra else [None if block.extra_keys is None else block for block in made]

    def _packed(self, request: Any, start: int, end: int) -> bytes | None:
        """Return the extra keys of a block, packed, or None if they cannot be packed. Then no event can have them."""
        extra_keys = self._extra_keys(request, start, end)
        if extra_keys is None:
            return b""
        try:
            return msgspec.msgpack.encode(extra_keys)
        except (TypeError, ValueError, OverflowError):  # half a surrogate in a client's salt
            return None


def unpacked(extra_keys: bytes) -> Any:
    """Return the extra keys of a description as vLLM has them: tuples, or None."""
    return _with_tuples(msgspec.msgpack.decode(extra_keys)) if extra_keys else None


def _with_tuples(value: Any) -> Any:
    return tuple([_with_tuples(each) for each in value]) if isinstance(value, list) else value
