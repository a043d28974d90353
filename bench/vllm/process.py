"""Runs each measurement in its own process, with a fresh CUDA context and nothing that an earlier one has left.

The processes are forks of the program, so that its imports are part of no figure. Therefore the program itself must
neither touch CUDA nor compute with torch, because a fork of a process that has done so may hang.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_GOODBYE = 20.0  # how long an engine may take to shut down, in seconds
FORK = multiprocessing.get_context("fork")


class MeasurementError(Exception):
    """A measurement failed or took too long, or its process died. The message says which."""


class Measurement(Generic[R]):
    """A call of `function(*args)`, which runs in its own process from now on."""

    def __init__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        self._name = function.__module__
        self._receiver, sender = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=_work, args=(sender, function, args, kwargs))
        self._process.start()
        sender.close()

    def result(self, timeout: float) -> R:
        """Return the result. Raises `MeasurementError`. All processes that the measurement has started are killed
        then."""
        try:
            if not self._receiver.poll(timeout):
                raise MeasurementError(f"{self._name}: no result within {timeout:g} s")
            value, error = self._receiver.recv()
            self._process.join(_GOODBYE)
        except EOFError:
            self._process.join()
            raise MeasurementError(f"{self._name}: its process died, exit code {self._process.exitcode}") from None
        finally:
            self.kill()
        if error is not None:
            raise MeasurementError(error)
        result: R = value
        return result

    @property
    def is_over(self) -> bool:
        """Whether the result has arrived, or the process has died."""
        return self._receiver.poll() or not self._process.is_alive()

    def kill(self) -> None:
        """Kill the process, and all processes that it has started. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()


def die_with_the_program() -> None:
    """Kill the present measurement on SIGTERM, too, which `timeout` sends, so that it cannot disturb the next one."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def run(timeout: float, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return Measurement(function, *args, **kwargs).result(timeout)


def _work(sender: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    outcome: tuple[Any, str | None]
    try:
        outcome = (function(*args, **kwargs), None)
    except Exception:  # noqa: BLE001 (the program raises it again)
        outcome = (None, traceback.format_exc())
    sender.send(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # because an engine in this process may have threads that do not end
