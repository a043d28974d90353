"""Offers: GPU blocks that could be stored, under the keys that name their contents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from kvstow.keys import make_key
from kvstow_service.connectors.vllm.kvgroups import KVGroup

_GROUP_ID_BYTES = 4  # at the end of a GPU block's hash


class Offer(NamedTuple):
    """Blocks that could be stored: `blocks[i]` holds the content that `keys[i]` names."""

    keys: list[bytes]
    blocks: list[int]


class OfferObserver(Protocol):
    """Hears of each run of blocks that is offered: those of one request and group, from its `first_block` on."""

    def offered(self, request: Any, group: KVGroup, first_block: int, keys: Sequence[bytes]) -> None: ...


def keys_of(block_hashes: Iterable[bytes], hash_bytes: int) -> list[bytes]:
    """Our keys for the contents that vLLM caches under these hashes. Each ends with the hash of the block's last hash
    block, which has `hash_bytes`, and the group's id."""
    begin = -_GROUP_ID_BYTES - hash_bytes
    return [_prefix(each[-_GROUP_ID_BYTES:]) + each[begin:-_GROUP_ID_BYTES] for each in block_hashes]


@cache
def _prefix(group_id: bytes) -> bytes:
    return make_key(int.from_bytes(group_id, "big"), b"")
