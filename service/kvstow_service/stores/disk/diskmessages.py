"""The messages between the service and the child process of a path. Requests have numbers, and are answered in any
order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from kvstow_service.stores.disk.places import BlockName, Place

MOST_PLACES = 2000
"""The largest number of places in one message."""
MOST_USES = 32_768
"""The largest number of times of last use in one message."""

Direction = Literal["read", "write"]
THREADS: Final = {"read": 8, "write": 4, "awaited": 2, "other": 1}
"""How many threads of the child process do each kind of work. Others wait for the answers of the `awaited` kind, such
as those of a purge."""


class Open(NamedTuple):
    """The first message: open the files in the folder `kvstow` of this path. `size_bytes`: see `BlockFile.open`."""

    path: str
    size_bytes: int | None


class Problem(NamedTuple):
    """The files cannot be used now. The child tries again by itself."""

    state: Literal["in use", "failed"]
    reason: str


class Opened(NamedTuple):
    """The files are open. The memfd that comes with this has the pickled `FoundFiles` of `BlockFile.load`, in
    `num_bytes` bytes. `file_system_bytes`: the size of the file system."""

    num_bytes: int
    file_system_bytes: int


class AddExtent(NamedTuple):
    """Map the memfd that comes with this."""

    extent: int
    num_bytes: int


class RemoveExtent(NamedTuple):
    """Unmap an extent. The answer comes when it is not mapped any more."""

    number: int
    extent: int


class PartAt(NamedTuple):
    """A rank's part of a block: `num_bytes` at `offset` of an extent. The bytes after them, up to the alignment, are
    padding."""

    extent: int
    offset: int
    num_bytes: int


class BlockAt(NamedTuple):
    place: Place
    name: BlockName
    parts: tuple[PartAt, ...]


class MoveBlocks(NamedTuple):
    number: int
    kind: Direction
    blocks: tuple[BlockAt, ...]


class ChangeFiles(NamedTuple):
    """Call this method of `BlockFile`."""

    number: int
    kind: Literal["awaited", "other"]
    method: Callable[..., None]
    arguments: tuple[Any, ...]


class CloseFiles(NamedTuple):
    """Sync everything and end, once the requests under way have ended."""


Result = Literal["read", "written", "missing", "corrupt", "failed"]


class Done(NamedTuple):
    """The answer to a request. `results`: the result for each block of a transfer. `error`: the error of the disk, if
    it did not work."""

    number: int
    results: tuple[Result, ...] = ()
    error: str = ""


Request = AddExtent | RemoveExtent | MoveBlocks | ChangeFiles | CloseFiles
