"""Answers of the node service that may not have arrived yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvstow.attach.connection import Call
from kvstow.errors import AttachError, CallFailedError, DisconnectedError

_T = TypeVar("_T")


class Answer(Generic[_T]):
    """The answer to a request of an `AttachedEngine`. Once it is `done` it has a `value`. If the service answered, the
    value is its answer. If the service refused the request or disconnected, the value promises nothing (no hits, no
    op), and `error` says why."""

    __slots__ = ("_call", "_read", "_value", "error", "is_unwanted")

    def __init__(self, call: Call, read: Callable[[Call], _T], without: _T) -> None:
        """`read` makes the value from a call that is done. If it raises, the value is `without`."""
        self.error: str | None = None
        self.is_unwanted = False
        """Set once the host no longer needs the value."""
        self._call: Call | None = call
        self._read = read
        self._value = without

    @property
    def done(self) -> bool:
        return self._call is None

    @property
    def value(self) -> _T:
        """Raises `AttachError` until the answer is `done`."""
        if self._call is not None:
            raise AttachError("the node service has not answered yet")
        return self._value

    @property
    def is_pending(self) -> bool:
        """Whether the answer is not done yet and the service has said that it needs time."""
        return self._call is not None and self._call.is_pending

    @property
    def call(self) -> Call | None:
        """The call, until the answer is `done`."""
        return self._call

    def resolve(self) -> None:
        """Read the value from the call, which must be done. Raises `ProtocolError` if the service sent a wrong answer;
        the value is then the one for no answer."""
        call, self._call = self._call, None
        assert call is not None
        try:
            self._value = self._read(call)
        except (CallFailedError, DisconnectedError) as error:
            self.error = str(error)
        except AttachError as error:
            self.error = str(error)
            raise
