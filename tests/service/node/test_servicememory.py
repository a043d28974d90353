"""What the service takes besides the pools."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.service.node.keepers import end_keeper
from tests.service.node.rawengine import HELLO, POOL, RawEngine, key_of
from tests.service.node.realservice import RealService

from kvstow.attach.calls import BeginStore, Hold, StoreBegun
from kvstow.attach.wire import MOST_STORED

pytestmark = pytest.mark.process

MIB = 1 << 20
SLOT_BYTES, NUM_SLOTS = 64, 1_000_000
_BATCH = MOST_STORED


@pytest.fixture
def service() -> Iterator[RealService]:
    with tempfile.TemporaryDirectory() as folder:
        made = RealService(Path(folder))
        with made.running:
            yield made


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) << 10


def journal_bytes(pid: int) -> int:
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "kvstow-journal" in os.readlink(fd):
            status = fd.stat()
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def test_a_million_cached_slots_take_at_most_320_bytes_each(service: RealService, tmp_path: Path) -> None:
    """RssAnon and the journal of the index, besides 120 MiB for the service itself."""
    (tmp_path / "state").mkdir(mode=0o700)
    service.running.callback(end_keeper, tmp_path / "state")
    service.serve("--memory", "64MiB", "--extent-size", "2MiB", "--state", str(tmp_path / "state"))
    pid = service.process.pid
    before = anonymous_bytes(pid)
    pool = replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1)
    engine = RawEngine(service.socket, replace(HELLO, pool=pool))
    fill(engine)
    anonymous, journal = anonymous_bytes(pid), journal_bytes(pid)
    engine.close()
    each = (anonymous - before + journal) / NUM_SLOTS
    print(f"{before >> 20} MiB, then {anonymous >> 20} and a journal of {journal >> 20}: {each:.0f} bytes a slot")
    assert journal >= 64 * NUM_SLOTS
    assert anonymous + journal <= 120 * MIB + 320 * NUM_SLOTS


def fill(engine: RawEngine) -> None:
    """Store a block in each of so many slots, without bytes, no faster than the pool grows."""
    stored = 0
    (worker,) = engine.workers
    while stored < NUM_SLOTS:
        most = min(stored + _BATCH, NUM_SLOTS)
        engine.wait_for(lambda most=most: sum(worker.registered.values()) >= most)  # type: ignore[misc]
        keys = [key_of(number) for number in range(stored, most)]
        begun = engine.ask(BeginStore(keys), StoreBegun)
        if begun.op_id:
            engine.complete(begun.op_id)
        else:
            engine.step()
        stored += len(begun.accepted)
    engine.wait_for(lambda: begun.op_id in engine.settled)


def num_found(engine: RawEngine) -> int:
    """Blocks that the engine finds. The first ones may have been evicted before the pool had all its memory."""
    found = 0
    for start in range(0, NUM_SLOTS, _BATCH):
        keys = [key_of(number) for number in range(start, min(start + _BATCH, NUM_SLOTS))]
        found += sum(length for _, length in engine.lookup(keys, Hold.NOTHING).runs)
    return found


@pytest.mark.soak
def test_a_million_blocks_are_found_again_after_a_restart(service: RealService, tmp_path: Path) -> None:
    """Prints how long that takes, from the start of the process; the bar is 5 s."""
    (tmp_path / "state").mkdir(mode=0o700)
    options = ("--memory", "64MiB", "--extent-size", "2MiB", "--state", str(tmp_path / "state"))
    hello = replace(HELLO, pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1))
    service.serve(*options)
    engine = RawEngine(service.socket, hello)
    fill(engine)
    stored = num_found(engine)
    service.process.kill()
    service.process.wait()
    begun = time.monotonic()
    service.serve(*options)
    answers = time.monotonic() - begun
    again = RawEngine(service.socket, hello, settled_tokens=(engine.welcome.token,))
    attached = time.monotonic() - begun
    last = [key_of(number) for number in range(NUM_SLOTS - 1000, NUM_SLOTS)]
    again.wait_for(lambda: again.lookup(last, Hold.NOTHING).leading == len(last))
    print(
        f"{answers:.2f} s to the attach socket, {attached:.2f} to a session, {time.monotonic() - begun:.2f} to the hits"
    )
    assert num_found(again) == stored > 0.9 * NUM_SLOTS
    engine.close()
    again.close()
    end_keeper(tmp_path / "state")
