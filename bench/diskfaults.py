"""What requests cost while the disk below the pool is broken, compared with the same requests without a disk.

Needs root, for file systems in images and, for the throttled disk, the cgroup controller `io`. A service with little
memory is filled with documents until its disk has all of them. Then the disk is broken, and requests begin: half of
them continue a document that the disk has and memory mostly lacks, and the others bring new documents. Computing a
block always takes the same time, so whatever a request waits for the disk shows in its own time. The engine itself sets
no limit to its waits: it takes each answer when the service gives it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import httpx
from msgspec.structs import replace
from tests.service.node.rawengine import HELLO, POOL, SLOT_BYTES, RawEngine, content_of, key_of
from tests.service.stores.disk.loopdisk import LoopDisk
from tests.waiting import eventually

from bench.report import Table, verdict
from kvstow.attach.calls import Admit, BeginLoad, BeginStore, End, Found, LoadBegun, Lookup, Prefill, StoreBegun
from kvstow.attach.identity import FleetWeights

_BLOCK_TOKENS = 16
_COMPUTE_SECONDS = 0.01
"""How long one block is computed."""
_BLOCKS = 32
"""The blocks of a document, which take 2 MiB."""
_DOCUMENTS = 256
_MEMORY, _DISK_BYTES = "64MiB", 1 << 30
_MOST_BEHIND = 256
"""While documents are stored, the disk may be behind by this many blocks, which are still in memory."""
_AT_ONCE = 8
"""How many requests are under way at the same time."""
_THROTTLED_BYTES = 256 << 10
"""How many bytes a throttled disk reads, and writes, in a second: a block of a document in a quarter of a second."""
_REPORT_SECONDS = 1.0
_CGROUPS = Path("/sys/fs/cgroup")
_BARS = {"on the disk": 1.02, "other": 1.01}
_STATES = ("full", "failing", "throttled", "frozen")

_HELLO = replace(
    HELLO,
    pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1),
    fleet_weights=FleetWeights("digest of the weights"),
)


class Seconds(NamedTuple):
    """How long the requests of a kind took until their prompt was computed."""

    kind: str
    seconds: float


class _Service:
    """`kvstow serve` with an engine, and a disk if `disk` is a folder."""

    def __init__(self, folder: Path, disk: Path | None, cgroup: Path | None, running: ExitStack) -> None:
        socket, admin = folder / "node" / "attach.sock", folder / "admin.sock"
        command = [sys.executable, "-m", "kvstow_service", "serve", "--memory", _MEMORY, "--extent-size", "2MiB"]
        command += ["--attach-socket", str(socket), "--admin-socket", str(admin), "--port", "0"]
        if disk is not None:
            command += ["--disk", str(disk), "--disk-size", str(_DISK_BYTES)]
        if cgroup is not None:
            command = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh", *command]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        running.callback(self._stop)
        transport = httpx.HTTPTransport(uds=str(admin), retries=0)
        self._client = running.enter_context(httpx.Client(transport=transport, base_url="http://kvstow"))
        eventually(self._answers, "the service to answer")
        self.engine = RawEngine(socket, _HELLO)
        running.callback(self.engine.close)
        self.engine.scheduler.send(Prefill((_COMPUTE_SECONDS / _BLOCK_TOKENS, 0.0, 0.0)))

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"the service has ended with status {self._process.returncode}; its log says why")
        try:
            return self._client.get("/livez").status_code == 200
        except httpx.TransportError:
            return False

    def _stop(self) -> None:
        """A disk that is throttled or frozen may keep the service's child, which ends once it is neither."""
        self._process.kill()
        self._process.wait()

    def state(self) -> str:
        (part,) = self._client.get("/v1/tier").json()["parts"]
        return str(part["state"])

    def written_blocks(self) -> int:
        (part,) = self._client.get("/v1/tier").json()["parts"]
        return int(part["counters"]["written_blocks"])


class _Traffic:
    """Requests of one engine, several at once. Each waits for the service's answers and for its blocks to be
    computed."""

    def __init__(self, engine: RawEngine, seed: int) -> None:
        self._engine, self._random = engine, Random(seed)
        self._numbers, self._new = count(1), count(_DOCUMENTS)
        self.took: list[Seconds] = []
        self.loaded_blocks = 0

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        under_way = [self._next() for _ in range(_AT_ONCE)]
        next_report = 0.0
        while under_way:
            if time.monotonic() > next_report:
                self._engine.workers[0].report()
                next_report = time.monotonic() + _REPORT_SECONDS
            self._engine.step()
            for request in list(under_way):
                if next(request, "over") == "over":
                    under_way.remove(request)
                    if time.monotonic() < end:
                        under_way.append(self._next())

    def _next(self) -> Iterator[None]:
        if self._random.random() < 0.5:
            return self._request("on the disk", keys_of(self._random.randrange(_DOCUMENTS)))
        return self._request("other", keys_of(next(self._new)))

    def _request(self, kind: str, keys: Sequence[bytes]) -> Iterator[None]:
        engine, number, began = self._engine, next(self._numbers), time.monotonic()
        looking = engine.scheduler.call(Lookup(keys))
        engine.scheduler.send(Admit(number, keys, (0, len(keys))))
        while not looking.done:
            yield
        found, loaded = looking.unpack(Found), 0
        if found.lease_id:
            beginning = engine.scheduler.call(BeginLoad(found.lease_id, 0, found.leading))
            while not beginning.done:
                yield
            begun = beginning.unpack(LoadBegun)
            for key, slot in zip(keys, begun.slots, strict=False):
                if engine.workers[0].read(slot) != content_of(key, 0):
                    raise RuntimeError(f"slot {slot} has other bytes than those of its key")
            engine.complete(begun.op_id)
            loaded = len(begun.slots)
            self.loaded_blocks += loaded
        computed = time.monotonic() + (len(keys) - loaded) * _COMPUTE_SECONDS
        while time.monotonic() < computed:
            yield
        self.took.append(Seconds(kind, time.monotonic() - began))
        if loaded < len(keys):
            storing = engine.scheduler.call(BeginStore(keys[loaded:]))
            while not storing.done:
                yield
            stored = storing.unpack(StoreBegun)
            for index, slot in zip(stored.accepted, stored.slots, strict=True):
                engine.workers[0].write(slot, content_of(keys[loaded + index], 0))
            if stored.op_id:
                engine.complete(stored.op_id)
        engine.scheduler.send(End(number))


def keys_of(document: int) -> list[bytes]:
    return [key_of(document * _BLOCKS + number) for number in range(_BLOCKS)]


def run(rounds: int, seconds: float, say: Callable[[str], None]) -> list[Table]:
    """Measure each state in each round, beside a run without a disk."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    states = [state for state in _STATES if state != "throttled" or _can_throttle()]
    for number in range(rounds):
        plain = _measure("none", seconds, number)
        say(f"round {number + 1}, without a disk: {plain}")
        for state in states:
            found = _measure(state, seconds, number)
            say(f"round {number + 1}, {state}: {found}")
            for kind in _BARS:
                ratios[state, kind].append(found[kind] / plain[kind])
                means[state, kind].append(found[kind])
                means["none", kind].append(plain[kind])
    rows = [["without a disk", *(f"{fmean(means['none', kind]) * 1e3:.1f} ms" for kind in _BARS), "", ""]]
    for state in _STATES:
        if state not in states:
            rows.append([state, "not run: this machine has no cgroup controller `io`", "", "", ""])
            continue
        of_state = [median(ratios[state, kind]) for kind in _BARS]
        bars = [
            f"{ratio:.3f} x; bar {bar:g}, {verdict(ratio <= bar)}"
            for ratio, bar in zip(of_state, _BARS.values(), strict=True)
        ]
        rows.append([state, *(f"{fmean(means[state, kind]) * 1e3:.1f} ms" for kind in _BARS), *bars])
    head = ["disk", "requests whose blocks are on the disk", "other requests", "of without a disk", "of without a disk"]
    return [Table("Mean time until a prompt is computed, beside a broken disk", head, rows)]


def _measure(state: str, seconds: float, seed: int) -> dict[str, float]:
    """Return the mean seconds of the requests of each kind."""
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="kvstow-faults-", dir=Path.cwd())))
        (folder / "node").mkdir()
        disk, cgroup = None, None
        if state != "none":
            disk = LoopDisk(folder, "ext4", 2 * _DISK_BYTES)
            running.callback(disk.unmount)
        if state == "throttled":
            cgroup = running.enter_context(_cgroup())
        service = _Service(folder, None if disk is None else disk.folder, cgroup, running)
        if disk is not None:
            eventually(lambda: service.state() == "on", "the disk")
        _fill(service, waits=disk is not None)
        if disk is not None:
            running.enter_context(_broken(disk, state, cgroup))
        traffic = _Traffic(service.engine, seed)
        traffic.run(seconds)
        return {kind: fmean(each.seconds for each in traffic.took if each.kind == kind) for kind in _BARS}


def _fill(service: _Service, *, waits: bool) -> None:
    """Store all documents, and wait until the disk has them."""
    engine, numbers = service.engine, count(1_000_000)
    for document in range(_DOCUMENTS):
        keys = keys_of(document)
        engine.store_all(keys)
        if waits:
            _wait_for_writes(service, (document + 1) * _BLOCKS - _MOST_BEHIND)
        number = next(numbers)
        engine.scheduler.send(Admit(number, keys, (0, 0)))
        engine.scheduler.send(End(number))


def _wait_for_writes(service: _Service, least: int) -> None:
    eventually(lambda: service.written_blocks() >= least, "the writes")


def _can_throttle() -> bool:
    controllers = _CGROUPS / "cgroup.controllers"
    return controllers.exists() and "io" in controllers.read_text().split()


@contextmanager
def _cgroup() -> Iterator[Path]:
    made = _CGROUPS / f"kvstow-faults-{os.getpid()}"
    (_CGROUPS / "cgroup.subtree_control").write_text("+io")
    made.mkdir()
    try:
        yield made
    finally:
        eventually(partial(_is_removed, made), "the disk's process to end")


def _is_removed(cgroup: Path) -> bool:
    """Remove the group if its processes have ended. Returns whether they have."""
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True


@contextmanager
def _broken(disk: LoopDisk, state: str, cgroup: Path | None) -> Iterator[None]:
    if state == "full":
        with (disk.folder / "other").open("wb") as other, suppress(OSError):  # until no space is left
            while True:
                other.write(bytes(1 << 20))
                other.flush()
        yield
    elif state == "failing":
        size = os.path.getsize(disk.image)
        os.truncate(disk.image, 1 << 20)
        yield
        os.truncate(disk.image, size)
    elif state == "frozen":
        disk.freeze()
        yield
        disk.thaw()
    elif state == "throttled":
        assert cgroup is not None
        device = os.stat(disk.folder).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        (cgroup / "io.max").write_text(f"{name} rbps={_THROTTLED_BYTES} wbps={_THROTTLED_BYTES}")
        yield
        (cgroup / "io.max").write_text(f"{name} rbps=max wbps=max")
    else:
        yield
