"""A process that writes blocks to a disk until it is killed, and prints which it has written.

python -m tests.service.stores.disk.diskwriter FOLDER FIRST
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.engine.tier.blockstorecontract import SLOT_BYTES, Client, keys_of

from kvstow_service.stores.disk.diskstore import DiskStore
from kvstow_service.stores.disk.startcheck import CheckedPath

SIZE = 96 << 20
FINGERPRINT = "0123456789abcdef" * 2
BATCH = 16


def value_of(number: int) -> int:
    return number * 31 % 251


def open_store(folder: Path) -> tuple[DiskStore, Client]:
    _, witness = os.pipe()
    store = DiskStore([CheckedPath(folder)], SIZE)
    store.start(witness)
    client = Client(store, identity="killed")
    client.fingerprint = FINGERPRINT
    while store.parts()[0].state != "on":
        time.sleep(0.01)
    return store, client


def expected(number: int) -> list[bytes]:
    return [bytes([value_of(number)]) * size for size in SLOT_BYTES]


def main() -> None:
    store, client = open_store(Path(sys.argv[1]))
    print("child", store.pids()[0], flush=True)
    number = int(sys.argv[2])
    while True:
        for slot in range(BATCH):
            client.fill(100 + slot, value_of(number + slot))
        op_id = client.begin("write", keys_of(range(number, number + BATCH)), range(100, 100 + BATCH))
        good, _ = client.finish(op_id, BATCH)
        print(*(number + slot - 100 for slot in sorted(good)), flush=True)
        number += BATCH


if __name__ == "__main__":
    main()
