"""The tokens of a request and the names of its prefixes; both follow from its prompt alone."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from zlib import crc32

import numpy as np
import numpy.typing as npt

VOCABULARY = 1000
Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A 64-bit hash (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sequence:
    """`tokens[p]` for every position of prompt and answer; `digests[p]` names the prefix that ends with it."""

    def __init__(self, prompt: Tokens[int], cache_salt: str, length: int) -> None:
        self.num_prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        digest = mix(crc32(cache_salt.encode()))
        digests = []
        for position in range(length):
            if position >= len(prompt):
                self.tokens.append(digest % VOCABULARY)
            digest = mix(digest ^ self.tokens[position])
            digests.append(digest)
        self.digests = np.array(digests, dtype=np.uint64)


def values(digests: Words, cache: str) -> Words:
    """What the KV cache named `cache` holds for the positions named by `digests`."""
    return (digests ^ np.uint64(mix(crc32(cache.encode())))) * np.uint64(0x9E3779B97F4A7C15)


def rejected(digests: Words) -> Words:
    """The names of prefixes that end with a wrong draft token, in the place of the right one."""
    return ~digests
