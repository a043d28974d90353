"""The node service of `bench.gpu.attach`, without an admin server: `python -m bench.gpu.attachnode PATH BYTES PAGES`.

PAGES is `huge` or `small` (4 KiB). It prints the seconds of populating as JSON, and ends when its input does.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings

_PR_SET_THP_DISABLE = 41


def main(path: str, num_bytes: int, pages: str) -> int:
    if pages == "small" and ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0):
        print("this kernel does not let a process do without huge pages", file=sys.stderr)
        return 1
    # One extent, because otherwise the engine would be granted more memory only as it fills what it has.
    settings = Settings(memory=num_bytes, attach_socket=Path(path), extent_size=num_bytes, pin_pause=0.0)
    node = Node(settings)
    begun = time.perf_counter()
    node.start()
    try:
        while (status := node.populator.status()).populated_bytes < num_bytes:
            if status.error is not None:
                print(status.error, file=sys.stderr)
                return 1
            time.sleep(0.01)
        found = {"seconds": time.perf_counter() - begun, "small_page_bytes": status.small_page_bytes}
        print(json.dumps(found), flush=True)
        sys.stdin.read()
    finally:
        node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
