"""The weight of a request in learning, which falls with the number of requests that its salt and namespace have sent.
So a client cannot teach a pool more than others by sending more."""

from __future__ import annotations

from hashlib import blake2b

_DIGEST_BYTES = 8
_HALVE_AT = 8192
"""After this many requests, older ones count half."""
_MOST_SALTS = 1024
"""How many salts of a namespace are counted separately. All others count as one salt."""
_MOST = 4.0
"""The largest weight of a request. Little is known of a salt with few requests, so it must not weigh more."""
_OTHERS = b"\0others"


def digest_of_salt(salt: str | None) -> bytes:
    """Return a digest that differs between cache salts, and from which no salt can be read. Empty without a salt."""
    if not salt:
        return b""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES, person=b"salt").digest()


class Shares:
    """How many requests each namespace, and each salt of it, has sent lately. The caller holds the pool's lock.
    Amortized O(1)."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[bytes, float]] = {}
        self._total = 0.0

    def weigh(self, tag: int, salt: bytes) -> float:
        """Count a request of this namespace and salt, and return its weight. All requests of a salt together weigh as
        much as all requests of another salt of the namespace, and all requests of a namespace as much as those of
        another namespace. On average, a request weighs 1."""
        salts = self._counts.setdefault(tag, {})
        if salt not in salts and len(salts) >= _MOST_SALTS:
            salt = _OTHERS
        salts[salt] = own = salts.get(salt, 0.0) + 1.0
        self._total += 1.0
        weight = self._total / (len(self._counts) * len(salts) * own)
        if self._total >= _HALVE_AT:
            self._halve()
        return min(weight, _MOST)

    def _halve(self) -> None:
        for tag, salts in list(self._counts.items()):
            left = {salt: count / 2 for salt, count in salts.items() if count >= 1.0}
            if left:
                self._counts[tag] = left
            else:
                del self._counts[tag]
        self._total = sum(sum(salts.values()) for salts in self._counts.values())
