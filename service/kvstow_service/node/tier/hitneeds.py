"""The blocks that a prompt's hit needs, for models with several KV groups."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvstow.attach.identity import GroupIdentity, PoolIdentity
from kvstow.keys import group_of
from kvstow_service.connectors.engine_core.kvgroups import GroupNeeds, KVGroup, KVGroups


def groups_of(identity: PoolIdentity) -> KVGroups | None:
    """Return the KV groups of a pool, or None if the model has kinds of groups that this version does not know."""
    known = tuple(one for index, group in enumerate(identity.groups) if (one := _group(index, group)) is not None)
    if not known or len(known) < len(identity.groups):
        return None
    return KVGroups(known, lcm(*(group.block_tokens for group in known)))


def needs_of(groups: KVGroups, keys: Sequence[bytes]) -> GroupNeeds | None:
    """Return the blocks that a hit needs. `keys` are those of a prompt's blocks, one group after the other, as engines
    send them. Returns None if a group has no key.

    Engines may leave out the first tokens if the GPU has them. Then it is unknown where a chunk begins, and too few
    blocks for a hit may be fetched. But engines ask for all tokens when a request arrives.
    """
    of_group: dict[int, list[bytes]] = {}
    for key in keys:
        of_group.setdefault(group_of(key), []).append(key)
    if len(of_group) < len(groups.groups):
        return None
    asked = [of_group[index] for index in sorted(of_group)]  # group numbers may have gaps: see `KVGroups`
    end = min(len(asked[group.index]) * group.block_tokens for group in groups.groups)
    return GroupNeeds(groups, lambda group, first, last: asked[group.index][first:last], end)


def _group(index: int, identity: GroupIdentity) -> KVGroup | None:
    tokens, window = identity.block_tokens, identity.window
    hashes = tokens // max(1, identity.hash_tokens)
    kind = identity.kind.partition(" ")[0]
    if kind.startswith("full"):
        return KVGroup(index, tokens, hashes)
    if kind == "window" and window is not None:
        return KVGroup(index, tokens, hashes, window=window)
    if kind == "chunk" and window:
        return KVGroup(index, tokens, hashes, chunk=window)
    if kind == "state":
        return KVGroup(index, tokens, hashes, is_state=True)
    return None
