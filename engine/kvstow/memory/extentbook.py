"""The books of a node's extents: which there are, whose they are, and which clients have mapped them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstow.errors import ConflictError, InvalidRequestError, NotFoundError


@dataclass(slots=True)
class BookedExtent:
    """`owner`: the last one that had it; `pool` and `row`: where it is, if it is not spare; `recalled`: its pool has
    lost it; `maps`: by client, how often it was handed out and not given back."""

    num_bytes: int
    numa_node: int | None
    owner: int | None = None
    pool: str | None = None
    row: int = 0
    recalled: bool = False
    maps: Counter[str] = field(default_factory=Counter)

    @property
    def is_spare(self) -> bool:
        return self.pool is None

    @property
    def may_change_hands(self) -> bool:
        """Its pool has lost it, and every client has let go of it."""
        return self.recalled and not self.maps


class ExtentBook:
    """Extents by number. Numbers are never used twice. Not locked."""

    def __init__(self, numa_nodes: Sequence[int | None]) -> None:
        self.extents: dict[int, BookedExtent] = {}
        self.allocated_bytes = 0
        self._numa_nodes = numa_nodes
        self._last_number = 0

    @property
    def spare_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents.values() if extent.is_spare)

    @property
    def recalled_bytes(self) -> int:
        """Of extents that were recalled, and that clients still have."""
        return sum(extent.num_bytes for extent in self.extents.values() if extent.recalled)

    def find(self, number: int) -> BookedExtent:
        """Raises `NotFoundError`."""
        if number not in self.extents:
            raise NotFoundError(f"there is no extent {number}")
        return self.extents[number]

    def create(self, num_bytes: int, numa_node: int | None) -> int:
        self.restore(self._last_number + 1, BookedExtent(num_bytes, numa_node))
        return self._last_number

    def restore(self, number: int, extent: BookedExtent) -> None:
        """An extent with a number that it had before a restart."""
        self.extents[number] = extent
        self.allocated_bytes += extent.num_bytes
        self._last_number = max(self._last_number, number)

    def close(self, number: int) -> None:
        self.allocated_bytes -= self.extents.pop(number).num_bytes

    def find_spare(self, num_bytes: int, node: int | None, owner: int) -> int | None:
        """One of this size that the owner may have: on the node, else on the one with the most spare memory; the oldest
        of them, as it is populated first."""
        by_node = self._bytes_by_node(spare_only=True)
        fitting = [
            (extent.numa_node != node, -by_node[extent.numa_node], number)
            for number, extent in self.extents.items()
            if extent.is_spare and extent.num_bytes == num_bytes and extent.owner in (None, owner)
        ]
        return min(fitting)[-1] if fitting else None

    def newest_spare(self, owner: int | None) -> int:
        """Of those that this owner may not have, else of all: the newest, as it is populated last."""
        spares = ((number, extent.owner) for number, extent in self.extents.items() if extent.is_spare)
        return max(spares, key=lambda spare: (spare[1] not in (None, owner), spare[0]))[0]

    def emptiest_node(self) -> int | None:
        by_node = self._bytes_by_node(spare_only=False)
        return min(self._numa_nodes, key=lambda node: by_node[node])

    def record_mapping(self, client: str, number: int) -> None:
        """Raises `ConflictError` if it may not be mapped."""
        extent = self.find(number)
        if extent.is_spare or extent.recalled:
            raise ConflictError(f"extent {number} is not in use, or was recalled: it may not be mapped")
        extent.maps[client] += 1

    def record_unmapping(self, client: str, number: int) -> None:
        """Raises `InvalidRequestError` if the client has no mapping."""
        maps = self.find(number).maps
        if client not in maps:
            raise InvalidRequestError(f"{client} has no mapping of extent {number}")
        maps[client] -= 1
        if not maps[client]:
            del maps[client]

    def record_death(self, client: str) -> None:
        for extent in self.extents.values():
            extent.maps.pop(client, None)

    def _bytes_by_node(self, *, spare_only: bool) -> Counter[int | None]:
        by_node: Counter[int | None] = Counter()
        for extent in self.extents.values():
            if extent.is_spare or not spare_only:
                by_node[extent.numa_node] += extent.num_bytes
        return by_node
