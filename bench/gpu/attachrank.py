"""An attached engine with one rank that copies: `python -m bench.gpu.attachrank PATH BYTES MOVED [tiny]`.

It registers BYTES of the service's memory, then stores and loads MOVED bytes, and compares the loaded ones. It prints
its figures as JSON. `tiny` tries the program on the CPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvstow.attach.calls import Hold
from kvstow.attach.engine import AttachedEngine
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Device
from kvstow.keys import make_key
from kvstow.layout import KVLayout, Region
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import PopulateOnly, Registrar
from kvstow.memory.slotpool import SlotPool
from kvstow.messages import Direction, Op, StepPlan

PAGE_BYTES, LAYERS = 32 << 10, 32
SLOT_BYTES = PAGE_BYTES * LAYERS
_PATIENCE_SECONDS = 120.0
_TURNS = 5

Copy = Callable[[Direction], None]


@dataclass(frozen=True, slots=True)
class Side:
    """The device's side of the copies. `plain` copies as many bytes as one op, with one call for all of them, and waits
    for the end. `spoil` overwrites the KV cache. `is_right` says whether the cache's blocks have their first contents
    again."""

    registrar: Registrar
    make_device: Callable[[SlotPool], Device]
    plain: Copy
    spoil: Callable[[], None]
    is_right: Callable[[], bool]


def layout_of(num_blocks: int) -> KVLayout:
    return KVLayout(tuple(Region(str(layer), num_blocks, PAGE_BYTES, PAGE_BYTES) for layer in range(LAYERS)))


def cuda_side(layout: KVLayout, num_bytes: int) -> Side:
    import torch

    from kvstow.devices.cuda import CudaDevice, CudaOptions, CudaRegistrar

    def plain(direction: Direction) -> None:
        if direction == "store":
            pinned.copy_(flat, non_blocking=True)
        else:
            flat.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    def spoil() -> None:
        for tensor in tensors:
            tensor.fill_(0xA5)
        torch.cuda.synchronize()

    flat = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    size = (layout.num_blocks, PAGE_BYTES)
    tensors = [torch.randint(0, 256, size, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
    before = [tensor.clone() for tensor in tensors]
    torch.cuda.synchronize()
    registrar = CudaRegistrar()
    return Side(
        registrar,
        lambda pool: CudaDevice(pool, layout, tensors, registrar=registrar, options=CudaOptions()),
        plain,
        spoil,
        lambda: all(torch.equal(*pair) for pair in zip(tensors, before, strict=True)),
    )


def cpu_side(layout: KVLayout, num_bytes: int) -> Side:
    from kvstow.devices.cpu import CpuDevice

    def plain(direction: Direction) -> None:
        target, source = (host, flat) if direction == "store" else (flat, host)
        target[:] = source

    def spoil() -> None:
        for array in arrays:
            array[:] = 0xA5

    chance = np.random.default_rng(0)
    flat, host = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    arrays = [chance.integers(0, 256, (layout.num_blocks, PAGE_BYTES), np.uint8) for _ in range(LAYERS)]
    before = [array.copy() for array in arrays]
    return Side(
        PopulateOnly(),
        lambda pool: CpuDevice(pool, layout, arrays),
        plain,
        spoil,
        lambda: all(np.array_equal(*pair) for pair in zip(arrays, before, strict=True)),
    )


class Client:
    """The scheduler half and the rank of an engine, in one process."""

    def __init__(self, path: Path, side: Side) -> None:
        regions = tuple(RegionIdentity(str(layer), PAGE_BYTES) for layer in range(LAYERS))
        groups = (GroupIdentity("full", 16, 16),)
        self.engine = AttachedEngine(
            path,
            engine="bench",
            pool=PoolIdentity((SLOT_BYTES,), regions, "uint8", groups),
            namespace=NamespaceIdentity("bench", "", "configured", ""),
        )
        self.pool = MappedPool(SLOT_BYTES, side.registrar)
        self.plane = DataPlane(0, self.pool, side.make_device(self.pool))
        self.worker = AttachedWorker(path, self.plane, self.pool, engine="bench")
        self.worker.start()

    def wait_until(self, condition: Callable[[], object]) -> float:
        """Wait until the condition holds, and return the seconds that it took."""
        begun = time.perf_counter()
        while not condition():
            self.engine.step()
            self.worker.join(self.engine.ticket)
            if time.perf_counter() > begun + _PATIENCE_SECONDS:
                raise TimeoutError(self.engine.problem or self.worker.problem or str(self.pool.status()))
            time.sleep(0.0002)
        return time.perf_counter() - begun

    def has_room(self) -> bool:
        """Whether the service lets this engine use slots."""
        answer = self.engine.begin_store((), ())
        self.engine.wait(answer, seconds=1.0)
        return answer.error is None and self.pool.pinned_slots > 0 and self.engine.store_room() > 0

    def store(self, keys: Sequence[bytes]) -> Op:
        answer = self.engine.begin_store(keys, range(len(keys)))
        self.engine.wait(answer, seconds=_PATIENCE_SECONDS)
        op = answer.value.op
        if op is None or len(op.slots) < len(keys):
            raise RuntimeError(f"not all of {len(keys)} blocks have a slot: {answer.value.outcomes} {answer.error}")
        return op

    def load(self, keys: Sequence[bytes]) -> Op:
        hits = self.engine.find(keys, hold=Hold.LEADING)
        self.engine.wait(hits, seconds=_PATIENCE_SECONDS)
        answer = self.engine.begin_load(hits.value.lease, range(hits.value.leading))
        self.engine.wait(answer, seconds=_PATIENCE_SECONDS)
        if answer.value is None or len(answer.value.slots) < len(keys):
            raise RuntimeError(f"{hits.value.leading} of {len(keys)} blocks were found: {answer.error}")
        return answer.value

    def run(self, op: Op) -> float:
        """Run an op. Returns the seconds from the submission until the rank has completed it."""
        begun = time.perf_counter()
        self.worker.submit(StepPlan((op,)))
        while True:
            self.plane.wait_completions(_PATIENCE_SECONDS)
            done = self.worker.take_completions()
            self.engine.complete(0, self.plane.boot_id, done)
            for completion in done:
                if completion.mark == "failed":
                    raise RuntimeError(completion.error)
                if completion.mark == "done":
                    seconds = time.perf_counter() - begun
                    self.wait_until(lambda: any(one.mark == "done" for one in self.engine.take_settled()))
                    return seconds

    def close(self) -> None:
        self.worker.close()
        self.engine.close()


def main(path: str, num_bytes: int, moved: int, *, tiny: bool) -> None:
    blocks = moved // SLOT_BYTES
    layout = layout_of(blocks)
    side = (cpu_side if tiny else cuda_side)(layout, moved)
    begun = time.perf_counter()
    client = Client(Path(path), side)
    client.wait_until(client.has_room)
    first = time.perf_counter() - begun
    wanted = num_bytes // SLOT_BYTES
    client.wait_until(lambda: client.pool.pinned_slots >= wanted)
    registered = time.perf_counter() - begun
    figures: dict[str, Any] = {"first": first, "registered": registered, "slots": client.pool.pinned_slots}
    times: dict[str, list[float]] = {name: [] for name in ("store", "load", "plain_store", "plain_load")}
    client.wait_until(lambda: client.has_room() and client.engine.store_room() >= blocks)
    for turn in range(_TURNS):
        keys = [make_key(0, (turn * blocks + block).to_bytes(32, "big")) for block in range(blocks)]
        times["store"].append(client.run(client.store(keys)))
        side.spoil()
        times["load"].append(client.run(client.load(keys)))
        if not side.is_right():
            raise ValueError("what was loaded is not what was stored")
        for direction in ("store", "load"):
            since = time.perf_counter()
            side.plain(direction)
            times[f"plain_{direction}"].append(time.perf_counter() - since)
    client.close()
    figures |= {name: median(values[1:]) for name, values in times.items()}  # without the first, which is a warm-up
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), tiny="tiny" in sys.argv[4:])
