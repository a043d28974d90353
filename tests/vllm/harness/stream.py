"""The compute stream: forwards are launched by the host and run later, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class ComputeStream:
    """Runs nothing on its own: the engine says when the next forward runs."""

    def __init__(self) -> None:
        self._launched: deque[Callable[[], None]] = deque()
        self._num_launched = self.num_run = 0

    def launch(self, work: Callable[[], None]) -> int:
        """The number of the launch, from 1."""
        self._launched.append(work)
        self._num_launched += 1
        return self._num_launched

    def run_until(self, number: int) -> None:
        while self.num_run < number:
            self._launched.popleft()()
            self.num_run += 1

    def fence(self) -> ComputeFence:
        """Reached when all that is launched so far has run."""
        return ComputeFence(self, self._num_launched)


class ComputeFence:
    """The place of a recorded event in the stream."""

    def __init__(self, stream: ComputeStream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.num_run >= self._number
