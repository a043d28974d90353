"""A node in a process of its own, for tests that kill it.

`python noderunner.py SOCKET STATE EXTENTS [keep] [timeout=SECONDS | elsewhere] [tier | tier=URL]` prints what it has
recovered, and for each line of its input what it has; before that, the line `tick` has it tick. It ends on SIGTERM.
With `elsewhere` it starts no keeper. With `tier` it has a store that never ends a fetch.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.doubles.memoryblockstore import MemoryBlockStore, MemoryStoredPool
from tests.service.node.wholenode import ample_memory

from kvstow.tier.blockstore import BlockStore
from kvstow.tier.tierstatus import TierStatus
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings
from kvstow_service.stores.stores import open_store

EXTENT_BYTES = 2 << 20


def settings_of(socket: Path, state: Path, extents: int, words: Sequence[str]) -> Settings:
    timeouts = [float(word.partition("=")[2]) for word in words if word.startswith("timeout=")]
    return Settings(
        memory=extents * EXTENT_BYTES,
        attach_socket=socket,
        extent_size=EXTENT_BYTES,
        pin_pause=0,
        state=state,
        tier=url_of(words),
        start_keeper="elsewhere" not in words,
        **{"keep_timeout": timeouts[0]} if timeouts else {},
    )


def url_of(words: Sequence[str]) -> str | None:
    urls = [word.partition("=")[2] for word in words if word.startswith("tier=")]
    return "mooncake://store:1" if "tier" in words else urls[0] if urls else None


def shares_of(node: Node) -> dict[str, int]:
    """As the thread says that owns the budget."""
    found: list[dict[str, int]] = []
    done = threading.Event()
    node.memory_thread.do(lambda: found.append(node.memory_thread.memory.budget.fair_shares()))
    node.memory_thread.do(done.set)
    assert done.wait(60)
    return found[0]


def shown(node: Node, store: BlockStore | None) -> dict[str, Any]:
    """What a test wants to know of the node."""
    pools = {
        pool.name: {
            "blocks": pool.facade.stats().pool.slots.cached,
            "quarantined": pool.facade.stats().pool.slots.quarantined,
            "free": pool.facade.stats().pool.slots.free,
            "usable": pool.facade.stats().pool.usable_slots,
            "is_waiting": pool.earlier is not None,
            "used": sum(past > 0 for past in pool.index.chains.pasts_of(0, pool.slots.limit)),
            "returns": float(pool.index.chains.hazards.observed()[1].sum()),
        }
        for pool in node.host.pools()
    }
    sessions = {one.id: [one.state, one.pool] for one in node.host.sessions()}
    for pool in node.host.pools():
        pool.facade.check_integrity()
    return {
        "pools": pools,
        "sessions": sessions,
        "shares": shares_of(node),
        "allocated": node.memory_thread.figures.allocated_bytes,
        "given_up": sum(one.num_bytes for one in node.memory_thread.memory.budget.closed.values()),
        "problems": [*node.memory_thread.figures.failures, *node.memory().unsaved],
        "faults": node.memory_thread.faults,
        "descriptors": len(os.listdir("/proc/self/fd")),
        **shown_tier(node, store),
    }


def tiers_of(node: Node) -> list[TierStatus]:
    return [] if node.tier is None else node.tier.tiers()


def written_blocks(node: Node) -> int:
    return sum(one.counters.written_blocks for one in tiers_of(node))


def is_connected(node: Node) -> bool:
    """Whether an engine has attached, and its blocks can be written from now on."""
    parts = [] if node.tier is None else node.tier.parts()
    return [part.state for part in parts] == ["on"] * 2 and all(one.state == "on" for one in tiers_of(node))


def shown_tier(node: Node, store: BlockStore | None) -> dict[str, Any]:
    if store is None:
        return {}
    if not isinstance(store, HungStore):
        return {"put": written_blocks(node), "connected": is_connected(node)}
    reads = sum(len(pool.reads) for pool in store.pools)
    return {"worker": None if store.worker is None else store.worker.pid, "gets": reads}


class HungStore(MemoryBlockStore):
    """Has whatever it is asked for, and never hands it out. Its process outlives the node."""

    def __init__(self) -> None:
        super().__init__()
        self.worker: subprocess.Popen[bytes] | None = None
        self.held = {"read"}

    def start(self, witness: int) -> None:
        self.worker = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, pass_fds=[witness])
        super().start(witness)

    def join(self, *given: Any) -> MemoryStoredPool:
        pool = super().join(*given)

        def has(fingerprint: str, keys: Sequence[bytes], on_answer: object) -> list[bool]:
            return [True] * len(keys)

        setattr(pool, "has", has)  # noqa: B010
        return pool


class RunningNode:
    """For the test."""

    def __init__(self, socket: Path, state: Path, environ: dict[str, str], extents: int = 8, *words: str) -> None:
        command = [sys.executable, __file__, str(socket), str(state), str(extents), *words]
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.first = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the node has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def show(self) -> dict[str, Any]:
        return self._ask("show")

    def tick(self) -> dict[str, Any]:
        """What its admin process has it do once a second."""
        return self._ask("tick")

    def _ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        return self._read()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        """Idempotent."""
        if self.process.poll() is None:
            self.kill()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


def main() -> None:
    socket, state, extents = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(level=logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    words = sys.argv[4:]
    settings = settings_of(socket, state, extents, words)
    store = HungStore() if "tier" in words else None if settings.tier is None else open_store(settings.tier)
    node = Node(settings, store=store, limits=ample_memory(state.parent / "limits"))
    try:
        node.start()
        print(json.dumps(shown(node, store)), flush=True)
        for line in sys.stdin:
            if line == "tick\n":
                node.tick()
            print(json.dumps(shown(node, store)), flush=True)
        signal.pause()
    except SystemExit:
        if "keep" not in sys.argv[4:]:
            node.give_back()
    finally:
        node.close()


if __name__ == "__main__":
    main()
