"""64-bit hashes of block keys, which numpy computes for many keys at once, because a Python call for each key would be
slow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_WORD = 8
_MIX_HEAD, _MIX_TAIL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_MIX_TAG = 0x94D049BB133111EB
_SHIFT = np.uint64(32)


@cache
def _words_of(width: int) -> np.dtype[np.void]:
    """Return the numpy type that reads the first and the last 8 bytes of keys of `width` bytes."""
    places = {"names": ["head", "tail"], "formats": ["<u8", "<u8"], "offsets": [0, width - _WORD], "itemsize": width}
    return np.dtype(places)  # type: ignore[call-overload,no-any-return]


def join_keys(keys: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the keys end to end, and how many bytes of that each key takes. If the keys are shorter than 8 bytes or
    differ in length, that is 8: the key's last 8 bytes, or the whole key behind zeros."""
    data, width = b"".join(keys), len(keys[0]) if keys else _WORD
    if width < _WORD or len(data) != len(keys) * width:
        return b"".join([key[-_WORD:].rjust(_WORD, b"\0") for key in keys]), _WORD
    return data, width


def hash_joined(data: bytes, width: int, tag: int = 0) -> Hashes:
    """Return a 64-bit hash of each key, which depends on its first and its last 8 bytes and on `tag`, the number of its
    namespace. For `data` and `width`, see `join_keys`."""
    words = np.frombuffer(data, _words_of(width))
    mixed: Hashes = words["head"] * _MIX_HEAD
    mixed ^= words["tail"]
    if tag:
        mixed ^= np.uint64(tag * _MIX_TAG & (1 << 64) - 1)
    mixed *= _MIX_TAIL
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_HEAD
    mixed ^= mixed >> _SHIFT
    return mixed


def hash_keys(keys: Sequence[bytes], tag: int = 0) -> Hashes:
    return hash_joined(*join_keys(keys), tag)
