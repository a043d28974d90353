"""The thread that asks a tier's store what it has, so that no step of a scheduler waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvstow.errors import TierUnavailableError
from kvstow.tier.lookups import LookupTable, Question
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import LookupClient

logger = logging.getLogger("kvstow.tier")

NameOf = Callable[[bytes], ObjectName]

_PROBE_KEY = bytes(34)


class LookupResult(NamedTuple):
    """How a question ended. `keys`: how many the store was asked about; 0 if all were known by then. `error`: why the
    store gave no answer."""

    is_probe: bool
    keys: int
    seconds: float
    error: str | None = None


class LookupThread:
    """Asks one question at a time. Thread-safe; only `close` waits."""

    def __init__(
        self,
        table: LookupTable,
        client: LookupClient,
        *,
        timeout: float = 1.0,
        on_news: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client` is closed by `close`. `on_news` is called on the thread after each answer; it must not wait."""
        self._table, self._client = table, client
        self._timeout, self._on_news, self._clock = timeout, on_news, clock
        self._state = threading.Condition()
        self._questions: deque[tuple[NameOf, Question | None]] = deque()
        """None: a probe."""
        self._results: list[LookupResult] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstow-tier-lookup", daemon=True)
        self._thread.start()

    def ask(self, name_of: NameOf) -> bool:
        """Send all that is wanted as one question, unless one is under way; whether it was sent. Call it once in a
        step: it is O(requests), because the thread finds the keys to ask about, and their names."""
        question = self._table.take_question()
        if question is None:
            return False
        self._send(name_of, question)
        return True

    def probe(self, fingerprint: str) -> None:
        """Ask for one object, to see whether the store answers."""
        self._send(lambda key: ObjectName(fingerprint, key, 0, 1), None)

    def take_results(self) -> list[LookupResult]:
        """All questions that have ended since the last call, in order."""
        with self._state:
            taken, self._results = self._results, []
            return taken

    def close(self) -> None:
        """Close the client and end the thread. Idempotent."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._client.close()
        self._thread.join()

    def _send(self, name_of: NameOf, question: Question | None) -> None:
        with self._state:
            self._questions.append((name_of, question))
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._questions or self._closing)
                if self._closing:
                    return
                name_of, question = self._questions.popleft()
            result = self._ask(name_of, question)
            with self._state:
                self._results.append(result)
            if self._on_news is not None:
                self._on_news()

    def _ask(self, name_of: NameOf, question: Question | None) -> LookupResult:
        keys = [_PROBE_KEY] if question is None else self._table.unknown(question)
        begun = self._clock()
        found, error = self._find([name_of(key) for key in keys]) if keys else ([], None)
        seconds = self._clock() - begun
        if question is not None:
            self._table.answer(question, keys, found)
        return LookupResult(question is None, len(keys), seconds, error)

    def _find(self, names: list[ObjectName]) -> tuple[list[bool], str | None]:
        """What the store has of these, and why it gave no answer."""
        try:
            found = self._client.exists(names, self._timeout)
            if len(found) != len(names):
                raise ValueError(f"the store gave {len(found)} answers for {len(names)} objects")
            return found, None
        except TierUnavailableError as outage:
            error = str(outage)
        except Exception as defect:
            logger.exception("a lookup of %d objects failed: unexpected error", len(names))
            error = repr(defect)
        return [False] * len(names), error
