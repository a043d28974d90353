"""What a hit is among the keys that an engine asks for, where its model has several KV groups or windows."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvstow.attach.identity import GroupIdentity, PoolIdentity
from kvstow.keys import group_of
from kvstow_service.connectors.engine_core.kvgroups import GroupNeeds, KVGroup, KVGroups


def groups_of(identity: PoolIdentity) -> KVGroups | None:
    """None if there are kinds of groups that this version does not know."""
    groups = [_group(index, group) for index, group in enumerate(identity.groups)]
    known = tuple([group for group in groups if group is not None])
    if not known or len(known) < len(groups):
        return None
    return KVGroups(known, lcm(*(group.block_tokens for group in known)))


def needs_of(groups: KVGroups, keys: Sequence[bytes]) -> GroupNeeds | None:
    """`keys`: those of a prompt's tokens, one group after the other, as engines ask for them. None if a group has no
    key.

    The first tokens may be left out, as those on the GPU are. Then it is not known where a chunk begins, and what is
    fetched may be too little for a hit. But engines ask for all tokens when a request arrives.
    """
    of_group: dict[int, list[bytes]] = {}
    for key in keys:
        of_group.setdefault(group_of(key), []).append(key)
    if len(of_group) < len(groups.groups):
        return None
    prompt = _Prompt([of_group[index] for index in sorted(of_group)])  # numbers may be left out: see `KVGroups`
    end = min(len(prompt.of_group[group.index]) * group.block_tokens for group in groups.groups)
    return GroupNeeds(groups, prompt, end)


class _Prompt:
    """`PromptKeys` of the engine's."""

    def __init__(self, of_group: list[list[bytes]]) -> None:
        self.of_group = of_group

    def keys(self, group: KVGroup, first: int, end: int) -> list[bytes]:
        return self.of_group[group.index][first:end]


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
