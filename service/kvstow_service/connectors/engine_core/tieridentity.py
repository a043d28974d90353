"""What an engine's blocks are in the store of the fleet tier."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow.tier.fingerprint import Fingerprint, fingerprint, named_weights

logger = logging.getLogger("kvstow.vllm")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""The longest pause, in seconds, between attempts to read files that could not be read. Each pause is twice the one
before."""


class TierIdentity:
    """What an engine's blocks are, on every node.

    If a file system returns an error, a thread tries again. Everything else is for the scheduler's thread, except
    `named` and `close`.
    """

    def __init__(
        self,
        pool: PoolIdentity,
        read_weights: Callable[[], FleetWeights],
        make_namespace: Callable[[], NamespaceIdentity],
        *,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        """Reads the weights, as they were loaded, at once. `make_namespace` works once vLLM has its block hashes: from
        the first request on. Both may raise `OSError`, and another thread then calls them again."""
        self._pool, self._read_weights, self._make_namespace = pool, read_weights, make_namespace
        self._pause = first_pause
        self._weights: FleetWeights | None = None
        self._namespace: NamespaceIdentity | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._error = ""
        try:
            self._weights = read_weights()
        except OSError as error:
            self._error = str(error)

    @property
    def is_final(self) -> bool:
        """Whether `fingerprint` no longer changes. Read this before `fingerprint`."""
        return self._weights is not None and self._namespace is not None

    def fingerprint(self) -> Fingerprint:
        """Available from the first request on. Only the first call reads files."""
        if self._thread is None and not self.is_final and not self._try():
            self._thread = threading.Thread(target=self._try_again, name="kvstow-tier-identity", daemon=True)
            self._thread.start()
        weights, namespace = self._weights, self._namespace
        if weights is None or namespace is None:
            return Fingerprint(None, self._unreadable())
        return fingerprint(self._pool, namespace, weights)

    def named(self, weights_id: str) -> Fingerprint:
        """The fingerprint with weights that a user gives this name on all nodes. Available from the first request
        on."""
        namespace = self._namespace
        if namespace is None:
            return Fingerprint(None, self._unreadable())
        return fingerprint(self._pool, namespace, named_weights(weights_id, namespace.model))

    def close(self) -> None:
        """Stop reading. Does not wait for a file system that hangs. Idempotent."""
        self._closing.set()

    def _unreadable(self) -> str:
        again = f"they are read again, after {LONGEST_PAUSE:.0f} s at most"
        return f"weights_unreadable: the files of the weights cannot be read ({self._error}); {again}"

    def _try(self) -> bool:
        """Whether everything is known."""
        try:
            if self._namespace is None:
                self._namespace = self._make_namespace()
            if self._weights is None:
                self._weights = self._read_weights()
        except OSError as error:
            self._error = str(error)
            return False
        return True

    def _try_again(self) -> None:
        pause = self._pause
        try:
            while not self._closing.wait(pause):
                if self._try():
                    logger.info("the files of the weights can be read again, for the fleet tier")
                    return
                pause = min(LONGEST_PAUSE, 2 * pause)
        except Exception:
            logger.exception("the weights have no name in the fleet tier: unexpected error")
