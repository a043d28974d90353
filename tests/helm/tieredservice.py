"""`kvstow serve --tier mooncake://...` whose store is in its own process."""

from __future__ import annotations

from tests.doubles.memoryblockstore import MemoryBlockStore

from kvstow_service.cli import main
from kvstow_service.stores import stores

if __name__ == "__main__":
    store = MemoryBlockStore()
    store.read_bytes_per_second = 1e9
    setattr(stores, "open_store", lambda settings: store)  # noqa: B010
    main()
