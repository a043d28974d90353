"""An engine of two ranks that stores and loads at random, over services that come and go, and verifies what it loads.

`python restartclient.py SOCKET SEED [DTYPE]`. For each line that it reads it prints what it has done. It ends with its
input. Engines with another `DTYPE` have a pool of their own, and other bytes for the same keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.doubles.fakes import FakeRegistrar

from kvstow.attach.connection import Answer
from kvstow.attach.engine import AttachedEngine, Hits
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.layout import KVLayout, Region
from kvstow.memory.mappedpool import MappedPool
from kvstow.messages import Op, StepPlan
from kvstow.results import StoreGrant
from kvstow_service.node.survival.orphanedmemory import find_orphaned_memory

SLOT_BYTES = 32 << 10
RANKS = 2
BLOCKS = 64
CHAINS = [[hashlib.sha256(b"%d-%d" % (chain, depth)).digest() for depth in range(12)] for chain in range(24)]

DTYPE = "uint8" if len(sys.argv) < 4 else sys.argv[3]
POOL = PoolIdentity(
    (SLOT_BYTES,) * RANKS, (RegionIdentity("layer.0", SLOT_BYTES),), DTYPE, (GroupIdentity("full", 16, 16),)
)
NAMESPACE = NamespaceIdentity("model", weights_id="w", weights_source="configured", hash_probe="p")


def content_of(key: bytes, rank: int) -> NDArray[np.uint8]:
    digest = hashlib.sha256(key + bytes([rank]) + DTYPE.encode()).digest()
    return np.frombuffer(digest * (SLOT_BYTES // 32), np.uint8)


class Rank:
    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.kv = np.zeros((BLOCKS, SLOT_BYTES), np.uint8)
        pool = MappedPool(SLOT_BYTES, FakeRegistrar())
        layout = KVLayout((Region("layer.0", BLOCKS, SLOT_BYTES, SLOT_BYTES),))
        self.plane = DataPlane(rank, pool, CpuDevice(pool, layout, [self.kv]))
        self.worker = AttachedWorker(path, self.plane, pool, engine="soak")
        self.worker.start()


class Client:
    """`stores` and `loads` count blocks; each loaded one was compared on each rank."""

    def __init__(self, path: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.engine = AttachedEngine(path, engine=f"soak-{seed}", pool=POOL, namespace=NAMESPACE)
        self.ranks = [Rank(path, rank) for rank in range(RANKS)]
        self.free = list(range(BLOCKS))
        self.keys: dict[int, Sequence[bytes]] = {}
        self.storing: list[tuple[Answer[StoreGrant], Sequence[bytes], list[int]]] = []
        self.finding: list[tuple[Answer[Hits], Sequence[bytes]]] = []
        self.loading: list[tuple[Answer[Op | None], Sequence[bytes], list[int]]] = []
        self.stores = self.loads = self.mismatches = 0
        self.is_quiet = False

    def step(self) -> None:
        for rank in self.ranks:
            self.engine.complete(rank.rank, rank.plane.boot_id, rank.worker.take_completions())
        self.engine.step()
        for rank in self.ranks:
            rank.worker.join(self.engine.ticket)
        self.take_answers()
        self.take_settled()
        if not self.is_quiet:
            self.begin()

    def begin(self) -> None:
        chain = self.chance.choice(CHAINS)[: self.chance.randint(1, 12)]
        if self.chance.random() < 0.5 and len(self.free) >= len(chain):
            blocks = [self.free.pop() for _ in chain]
            for rank in self.ranks:
                for key, block in zip(chain, blocks, strict=True):
                    rank.kv[block] = content_of(key, rank.rank)
            self.storing.append((self.engine.begin_store(chain, blocks), chain, blocks))
        elif len(self.finding) < 4:
            self.finding.append((self.engine.find(chain), chain))

    def take_answers(self) -> None:
        for storing in [one for one in self.storing if one[0].done]:
            self.storing.remove(storing)
            self.start_store(storing[0].value, *storing[1:])
        for finding in [one for one in self.finding if one[0].done]:
            self.finding.remove(finding)
            self.start_load(finding[0].value, finding[1])
        for loading in [one for one in self.loading if one[0].done]:
            self.loading.remove(loading)
            op, keys, blocks = loading[0].value, loading[1], loading[2]
            if op is None:
                self.free += blocks
            else:
                self.submit(op, keys)

    def start_store(self, grant: StoreGrant, keys: Sequence[bytes], blocks: list[int]) -> None:
        used = set() if grant.op is None else set(grant.op.blocks)
        self.free += [block for block in blocks if block not in used]
        if grant.op is not None:
            self.submit(grant.op, [keys[index] for index in grant.accepted])

    def start_load(self, hits: Hits, keys: Sequence[bytes]) -> None:
        if not hits.leading or hits.leading > len(self.free):
            self.engine.release_lease(hits.lease)
            return
        blocks = [self.free.pop() for _ in range(hits.leading)]
        for rank in self.ranks:
            rank.kv[blocks] = 0
        self.loading.append((self.engine.begin_load(hits.lease, blocks), keys[: hits.leading], blocks))

    def submit(self, op: Op, keys: Sequence[bytes]) -> None:
        self.keys[op.op_id] = keys
        for rank in self.ranks:
            rank.worker.submit(StepPlan((op,)))

    def take_settled(self) -> None:
        for settled in self.engine.take_settled():
            if settled.mark == "source_free":
                continue
            keys = self.keys.pop(settled.op_id)
            if settled.mark == "done" and settled.direction == "load":
                self.verify(keys, settled.blocks)
            elif settled.mark == "done":
                self.stores += len(keys)
            self.free += settled.blocks

    def verify(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.loads += len(keys)
        for rank in self.ranks:
            for key, block in zip(keys, blocks, strict=True):
                self.mismatches += not np.array_equal(rank.kv[block], content_of(key, rank.rank))

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        self.engine.close()


class RestartEngine:
    """For the test: the client in a process of its own."""

    def __init__(self, socket: Path, environ: dict[str, str], seed: int = 1, dtype: str = "uint8") -> None:
        self.dtype = dtype
        command = [sys.executable, __file__, str(socket), str(seed), dtype]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        assert self._read() == "ready\n"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def show(self) -> dict[str, int]:
        """What it has done; no byte was wrong."""
        assert self.process.stdin is not None
        self.process.stdin.write("show\n")
        self.process.stdin.flush()
        found: dict[str, int] = json.loads(self._read())
        assert (found["mismatches"], found["faults"]) == (0, 0)
        return found

    def has_memory_besides(self, *pids: int) -> bool:
        """That is not also one of these processes'."""
        return any(one.pid == self.process.pid for one in find_orphaned_memory(pids))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    client = Client(Path(sys.argv[1]), int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        client.step()
        if select.select([0], [], [], 0.001)[0]:
            if not os.read(0, 100):
                break
            done = {"stores": client.stores, "loads": client.loads, "mismatches": client.mismatches}
            print(json.dumps(done | {"faults": sum(rank.worker.faults for rank in client.ranks)}), flush=True)
    client.is_quiet = True
    client.close()


if __name__ == "__main__":
    main()
