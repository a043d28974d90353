"""Whether a session may use the store of its fleet tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Literal

NO_NAME = "the weights have no name, by which other nodes could know them"
"""Why a tier is off, unless the host knows more."""
CLOSED = "the store is being detached"
"""Why a tier is off once it was closed."""
NAMED = "an operator has named the weights: it begins with the engine's next step"
"""Why it is still off then."""
BYPASSED = "an operator has switched it off"


class TierSwitch:
    """On while the weights have a name, no operator has switched it off, and the tier was not closed.

    `reset`, `take_name` and setting the `fingerprint` are for the thread of the host; everything else may be called
    from any thread, and nothing waits.
    """

    def __init__(self, fingerprint: str | None, off_reason: str, clock: Callable[[], float]) -> None:
        """`fingerprint`: see `ObjectName`. None: it is off until it is set, for the `off_reason`."""
        self.fingerprint = fingerprint
        self._off_reason = off_reason
        self._clock = clock
        self._bypassed_until = -inf
        self._resets = 0
        self._names: deque[tuple[int, str]] = deque(maxlen=1)
        """The name that an operator has given to the weights, and after how many resets."""
        self.is_closed = False

    @property
    def is_on(self) -> bool:
        return self.fingerprint is not None and not self.is_bypassed and not self.is_closed

    @property
    def is_bypassed(self) -> bool:
        return self._clock() < self._bypassed_until

    def reset(self, reason: str) -> None:
        """The weights have no name any more, for this reason."""
        self._resets += 1
        self._off_reason = reason
        self.fingerprint = None

    def set_bypassed(self, bypassed: bool, seconds: float | None = None) -> None:
        """An operator switches it off, for so many seconds or (None) until further notice, or on again."""
        lasts = inf if seconds is None else seconds
        self._bypassed_until = self._clock() + lasts if bypassed else -inf

    def name_weights(self, fingerprint: str) -> None:
        """An operator names the weights that the engine has now. The last name counts."""
        self._names.append((self._resets, fingerprint))

    def take_name(self) -> str | None:
        """The name that an operator has given to weights that have none. None if they have one by now, or if they have
        changed since: the name is of weights that are gone."""
        if not self._names:
            return None
        resets, name = self._names.pop()
        return name if self.fingerprint is None and resets == self._resets else None

    def close(self) -> None:
        """Off for good."""
        self.is_closed = True

    @property
    def state(self) -> Literal["on", "off", "bypassed"]:
        if self.fingerprint is None or self.is_closed:
            return "off"
        return "bypassed" if self.is_bypassed else "on"

    @property
    def reason(self) -> str:
        """Why it is not on; empty if it is."""
        if self.is_closed:
            return CLOSED
        if self.fingerprint is None:
            return NAMED if self._names else self._off_reason
        return BYPASSED if self.is_bypassed else ""
