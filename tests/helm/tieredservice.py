"""`kvstow serve --tier redis://...` whose store is in its own process."""

from __future__ import annotations

from kvstow.testing.memorystore import MemoryStore
from kvstow_service.cli import main
from kvstow_service.node import nodeprocess

if __name__ == "__main__":
    setattr(nodeprocess, "open_store", lambda url: MemoryStore())  # noqa: B010
    main()
