"""Answers of the node service that have not arrived yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvstow.attach.connection import Call
from kvstow.errors import AttachError, CallFailedError, DisconnectedError

_T = TypeVar("_T")


class Answer(Generic[_T]):
    """What an `AttachedEngine` was asked for. Once it is `done` it has a `value`: what the service has answered or, if
    that has refused or gone, a value that promises nothing (no hits, no op); `error` says why then."""

    __slots__ = ("_call", "_read", "_value", "error", "is_unwanted")

    def __init__(self, call: Call, read: Callable[[Call], _T], without: _T) -> None:
        """`read` makes the value of a call that is done; the value is `without` if it raises."""
        self.error: str | None = None
        self.is_unwanted = False
        """The host has no use for the value."""
        self._call: Call | None = call
        self._read = read
        self._value = without

    @property
    def done(self) -> bool:
        return self._call is None

    @property
    def value(self) -> _T:
        """Raises `AttachError` while it is not `done`."""
        if self._call is not None:
            raise AttachError("the node service has not answered yet")
        return self._value

    @property
    def is_pending(self) -> bool:
        """Whether it is not done, and the service has said that it takes time."""
        return self._call is not None and self._call.is_pending

    @property
    def call(self) -> Call | None:
        """The call, until the answer is `done`."""
        return self._call

    def resolve(self) -> None:
        """The call is done. Raises `ProtocolError` where the service has answered something else; the value is the one
        without an answer then."""
        call, self._call = self._call, None
        assert call is not None
        try:
            self._value = self._read(call)
        except (CallFailedError, DisconnectedError) as error:
            self.error = str(error)
        except AttachError as error:
            self.error = str(error)
            raise
