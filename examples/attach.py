"""Attach to a node service, store 32 blocks, load them back and compare the bytes. `docs/engines.md` explains it.

$ kvstow serve --memory 256MiB --attach-socket /tmp/kvstow/attach.sock
$ python examples/attach.py unix:/tmp/kvstow/attach.sock
"""

import sys
import time

import numpy as np

from kvstow.attach.calls import Hold
from kvstow.attach.connection import socket_path
from kvstow.attach.engine import AttachedEngine
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.layout import KVLayout, Region
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import MlockRegistrar
from kvstow.messages import StepPlan

BLOCKS, PAGE, PATIENCE = 32, 64 << 10, 30.0

path = socket_path(sys.argv[1])
kv = np.random.default_rng().integers(0, 256, (BLOCKS, PAGE), np.uint8)  # the KV cache of an engine with one layer
keys = [block[:32].tobytes() for block in kv]

pool_identity = PoolIdentity((PAGE,), (RegionIdentity("layer.0", PAGE),), "uint8", (GroupIdentity("full", 16, 16),))
namespace = NamespaceIdentity("example", weights_id="none", weights_source="configured", hash_probe="example")
engine = AttachedEngine(path, engine="example", pool=pool_identity, namespace=namespace)  # the scheduler half

pool = MappedPool(PAGE, MlockRegistrar())  # the worker of rank 0, here in the same process
plane = DataPlane(0, pool, CpuDevice(pool, KVLayout((Region("layer.0", BLOCKS, PAGE, PAGE),)), [kv]))
worker = AttachedWorker(path, plane, pool, engine="example")
worker.start()


def step_until(found):
    """Make steps of a host until `found` returns something."""
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline, engine.problem or worker.problem or "the service gave no memory in time"
        engine.complete(0, plane.boot_id, worker.take_completions())
        engine.step()
        worker.join(engine.ticket)
        time.sleep(0.001)
    return value


def answered(answer):
    engine.wait(answer, seconds=PATIENCE)
    return answer.value


def run(op):
    worker.submit(StepPlan((op,)))
    ended = step_until(lambda: [one for one in engine.take_settled() if one.mark != "source_free"])
    return ended[0].mark


def store_missing():
    """Store the blocks that the pool lacks, and return whether it has all of them. A pool gets its memory piece by
    piece, so a store may find slots for a part of its blocks only."""
    grant = answered(engine.begin_store(keys, range(BLOCKS)))
    if grant.op:
        print(f"store of {len(grant.op.blocks)} blocks:", run(grant.op))
    return answered(engine.find(keys, hold=Hold.NOTHING)).leading == BLOCKS


step_until(store_missing)
before = kv.copy()
kv[:] = 0
hits = answered(engine.find(keys))
print(f"load of {hits.leading} blocks:", run(answered(engine.begin_load(hits.lease, range(hits.leading)))))
print("bytes:", "equal" if np.array_equal(kv, before) else "different")
worker.close()
engine.close()
