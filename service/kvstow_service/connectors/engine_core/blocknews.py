"""What an `EventFeed` learns about the blocks in host memory, from the engine in this process or from the node
service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstow.attach.calls import BlockChange
from kvstow.results import Awaited, Given

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine

_BATCHES_PER_READ = 256


class BlockNews(NamedTuple):
    """What has happened since the last news. `lost`: more has happened, but it is unknown. `gone`: blocks of earlier
    news can no longer be found, until later news or a lookup says otherwise."""

    changes: Sequence[BlockChange] = ()
    lost: bool = False
    gone: bool = False


class BlockSource(Protocol):
    """Used by the scheduler's thread. No call waits."""

    def read(self) -> BlockNews: ...

    def look_up(self, keys: Sequence[bytes]) -> Awaited[Sequence[bool]] | None:
        """Which of these blocks are present. An answer with an `error` says nothing. None if nobody can say now."""


class EmbeddedBlocks:
    """The blocks of the engine in this process."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._cursor = engine.events.last_sequence

    def read(self) -> BlockNews:
        log = self._engine.events
        if log.last_sequence == self._cursor:
            return BlockNews()
        page = log.read(self._cursor, _BATCHES_PER_READ)
        self._cursor = page.cursor
        return BlockNews([BlockChange(event.kind, event.keys) for event in page.events], page.lost > 0)

    def look_up(self, keys: Sequence[bytes]) -> Given[Sequence[bool]]:
        return Given([self._engine.block(key) is not None for key in keys])
