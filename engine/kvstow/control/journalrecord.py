"""The record of a slot in a journal: eight words of 64 bits.

word 0   checksum of all others, of the slot's number and of the journal; 0: there is no block
word 1   of a block, its namespace and the length of its key; of a slot that a session may be writing, that session
word 2   to 6: the key, of at most 40 bytes
word 7   of a block, its place in the order of publishing
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstow.errors import InvalidRequestError

RECORD_BYTES = 64
WORDS = RECORD_BYTES // 8
COMMIT, STATE, KEY, ORDER = 0, 1, 2, 7
MAX_KEY_BYTES = 40
MAX_SESSION = (1 << 48) - 1

_FILLING = np.uint64(0xF111 << 48)
_FILLING_MASK = np.uint64(0xFFFF << 48)
_MAX_NAMESPACE = (1 << 32) - 1

# Odd constants of the checksum.
_FACTORS = [np.uint64(value) for value in (
    0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93,
    0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3,
)]  # fmt: skip
_SHIFT = np.uint64(29)

Words = NDArray[np.uint64]


def filling_state(session: int) -> np.uint64:
    """The state word of a slot that this session may be writing. Raises `InvalidRequestError`."""
    if not 0 <= session <= MAX_SESSION:
        raise InvalidRequestError(f"session is {session}; allowed: 0 to {MAX_SESSION}")
    return _FILLING | np.uint64(session)


def is_filling(records: Words) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = records[:, STATE] & _FILLING_MASK == _FILLING
    return found


def sessions_of(records: Words) -> list[int]:
    """Of filling slots."""
    sessions: list[int] = (records[:, STATE] & ~_FILLING_MASK).tolist()
    return sessions


def make_blocks(namespace: int, keys: Sequence[bytes]) -> Words:
    """Records of blocks, without order and checksum. Raises `InvalidRequestError`."""
    if not 0 <= namespace <= _MAX_NAMESPACE:
        raise InvalidRequestError(f"namespace is {namespace}; allowed: 0 to {_MAX_NAMESPACE}")
    width = len(keys[0]) if keys else 0
    if not 0 < width <= MAX_KEY_BYTES or any(len(key) != width for key in keys):
        raise InvalidRequestError(f"keys of the journal have one length, from 1 to {MAX_KEY_BYTES} bytes")
    records = np.zeros((len(keys), WORDS), np.uint64)
    records[:, STATE] = namespace | width << 32
    as_bytes = records.view(np.uint8)
    as_bytes[:, KEY * 8 : KEY * 8 + width] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), width)
    return records


def read_blocks(records: Words, rows: NDArray[np.intp]) -> dict[int, dict[bytes, int]]:
    """By namespace: keys and slots. Of equal keys, the last one counts."""
    blocks: dict[int, dict[bytes, int]] = {}
    kinds = records[:, STATE]
    for kind in np.unique(kinds).tolist():
        namespace, width = kind & _MAX_NAMESPACE, kind >> 32
        chosen = kinds == kind
        data = np.ascontiguousarray(records[chosen, KEY:ORDER]).view(np.uint8)[:, :width].tobytes()
        keys = (data[at : at + width] for at in range(0, len(data), width))
        blocks.setdefault(namespace, {}).update(zip(keys, rows[chosen].tolist(), strict=True))
    return blocks


def checksums(salt: np.uint64, rows: NDArray[np.intp], records: Words) -> Words:
    """Of the records of these slots in the journal with this salt; never 0."""
    sums: Words = salt ^ (rows.astype(np.uint64) * _FACTORS[0])
    for word in range(STATE, WORDS):
        sums ^= records[:, word]
        sums *= _FACTORS[word]
        sums ^= sums >> _SHIFT
    sums[sums == 0] = 1
    return sums
