"""Makes faults of real processes, and prints what the service says of each, and after how many seconds:

    python -m tests.service.node.faulttable

Everything here runs without a GPU. It takes about four minutes. The faults of disks need root and loop devices, and the
one of a certificate the command `openssl`. A row without an answer ends it with status 1.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from msgspec.structs import replace
from tests.service.node.keepers import end_keeper, look
from tests.service.node.rawengine import HELLO, POOL, RawEngine, key_of
from tests.service.node.realservice import RealService
from tests.service.stores.disk.loopdisk import LoopDisk

from kvstow.attach.calls import Prefill
from kvstow.attach.connection import AttachConnection
from kvstow.attach.identity import FleetWeights, RegionIdentity

_PATIENCE_SECONDS = 60.0


class Row(NamedTuple):
    """`seconds` is None if nothing told of the fault in time."""

    fault: str
    where: str
    seconds: float | None
    what: str


def eventually(condition: Callable[[], Any], what: str = "", *, seconds: float = _PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


class Table:
    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.rows: list[Row] = []

    @contextmanager
    def service(self, *options: str, cgroup: Path | None = None) -> Any:
        """A service in a folder of its own, and a client of it. `cgroup`: the one that it belongs to."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        service = RealService(folder, eventually)
        with service.running:
            yield service, service.serve("--memory", "64MiB", "--extent-size", "2MiB", *options, cgroup=cgroup), folder

    def told(self, fault: str, client: httpx.Client, name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """How long it takes until the doctor has the condition. `meanwhile`: called again and again until then."""
        begun, found = time.monotonic(), dict[str, str]()

        def is_told() -> bool:
            meanwhile()
            found.update({one["name"]: one["what"] for one in client.get("/v1/doctor").json()["conditions"]})
            return name in found

        self._add(fault, f"doctor: {name}", begun, is_told, lambda: found[name])

    def refused(self, fault: str, *options: str, cgroup: Path | None = None) -> None:
        """How long it takes until `kvstow serve` says why it does not start."""
        begun = time.monotonic()
        command = [sys.executable, "-m", "kvstow_service", "serve", "--memory", "64MiB", *options]
        sockets = self._folder / f"refused-{len(self.rows)}"
        command += ["--admin-socket", f"{sockets}.sock", "--attach-socket", f"{sockets}/attach.sock"]
        if cgroup is not None:
            command = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh", *command]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_SECONDS)
        self._add(
            fault, "kvstow serve", begun, lambda: ended.returncode in (1, 2), lambda: ended.stderr.splitlines()[-1]
        )

    def failing(self, fault: str, client: httpx.Client, check: str) -> None:
        """How long it takes until the check of readiness fails."""
        begun, text = time.monotonic(), [""]

        def fails() -> bool:
            answer = client.get(f"/readyz/{check}?verbose")
            text[0] = answer.text.splitlines()[0]
            return answer.status_code == 503

        self._add(fault, f"/readyz/{check}", begun, fails, lambda: text[0])

    def _add(self, fault: str, where: str, begun: float, is_told: Callable[[], bool], what: Callable[[], str]) -> None:
        try:
            eventually(is_told)
            row = Row(fault, where, time.monotonic() - begun, what())
        except TimeoutError:
            row = Row(fault, where, None, "nothing")
        self.rows.append(row)
        seconds = "never" if row.seconds is None else f"{row.seconds:.1f} s"
        print(f"{row.fault:52} {seconds:>7}  {row.where}: {row.what[:150]}", flush=True)


LARGE = replace(POOL, slot_bytes=(1 << 30, 1 << 30), regions=(RegionIdentity("layer.0", 1 << 30),))


@contextmanager
def loop_disk(images: Path) -> Iterator[LoopDisk]:
    disk = LoopDisk(images, "ext4", 256 << 20)
    try:
        yield disk
    finally:
        disk.unmount()


def keys_of(first: int, count: int) -> list[bytes]:
    return [key_of(number) for number in range(first, first + count)]


def with_a_keeper(table: Table) -> None:
    with table.service("--state", str(table._folder / "state")) as (_, client, _folder):
        eventually(lambda: client.get("/startupz").status_code == 200)
        keeper = look(table._folder / "state").pid
        os.kill(keeper, signal.SIGSTOP)
        table.told("the keeper is stopped", client, "keeper")
        os.kill(keeper, signal.SIGCONT)
    end_keeper(table._folder / "state", signal.SIGKILL)
    with table.service("--state", str(table._folder / "none"), "--no-start-keeper") as (_, client, _folder):
        table.told("there is no keeper", client, "keeper")


def with_engines(table: Table) -> None:
    with table.service() as (service, client, _):
        engine, _ = service.engine()
        engine.send_signal(signal.SIGSTOP)
        table.told("an engine with nothing in flight is stopped", client, "session_stopped")
        table.told("its ranks report nothing meanwhile", client, "rank_silent")
        engine.send_signal(signal.SIGCONT)
        service.engine_later("--lose", "1")
        table.told("connections end, and processes keep the memory", client, "session_lost")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(service.socket))
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            table.told("something other than an engine connects", client, "rejected")
        client.put("/v1/drain", json={"mode": "all"})
        table.told("an operator drains the node", client, "drain")
        client.delete("/v1/drain")
        client.put("/v1/bypass", json={"load": True, "store": False})
        table.told("an operator bypasses loads", client, "bypass")
        service.process.send_signal(signal.SIGSTOP)
        time.sleep(8.0)
        service.process.send_signal(signal.SIGCONT)
        table.failing("the service itself was stopped for 8 s", client, "loop")


def with_orphans(table: Table) -> None:
    with table.service() as (service, _, _folder):
        service.engine()
        service.process.kill()
        with table.service() as (_, client, _other):
            table.told("engines of a service that is away have its memory", client, "orphaned_memory")


def with_tokens(table: Table) -> None:
    token = table._folder / "token"
    token.write_text("a-token")
    token.chmod(0o600)
    with table.service("--token-file", str(token)) as (_, client, _folder):
        token.chmod(0o644)
        table.told("other users may read the token file", client, "token_files")
        token.chmod(0o600)
        token.write_text("")
        table.told("the token file is emptied", client, "token_unusable")
        token.write_text("a-token")
        eventually(lambda: not client.get("/v1/doctor").json()["conditions"])
        token.unlink()
        table.told("the token file is removed", client, "token_unusable")


def with_memory(table: Table) -> None:
    """Faults of engines and of what they do to a pool; the engines are this process's."""
    with table.service("--transfer-timeout", "3s") as (service, client, _):
        engine = RawEngine(service.socket)
        engine.store_until_found(keys_of(0, 40))
        engine.begin_store(keys_of(1000, 1))
        table.told("a store is begun and never completed", client, "session_stuck", engine.step)
        engine.close()
    with table.service() as (service, client, _):
        engine = RawEngine(service.socket, ranks=0)
        table.told("an engine attaches, and its workers do not", client, "session_attaching", engine.step)
        engine.close()
        large = AttachConnection(service.socket, lambda: replace(HELLO, pool=LARGE))
        table.told("an engine comes whose slot is larger than the memory", client, "rejected", lambda: large.poll(0.1))
        large.close()
    with table.service("--policy", "lru") as (service, client, _):
        engine = RawEngine(service.socket)
        for first in range(0, 4000, 40):
            engine.store_all(keys_of(first, 40))
        table.told("more is stored than fits, and nothing hits", client, "thrashing", engine.step)
        (pool,) = client.get("/v1/pools").json()["items"]
        client.patch(f"/v1/pools/{pool['name']}", json={"pinning_paused": True})
        table.told("an operator pauses pinning", client, "pinning_paused", engine.step)
        engine.close()


def with_disks(table: Table) -> None:
    named = replace(HELLO, fleet_weights=FleetWeights("digest 1"))
    with tempfile.TemporaryDirectory(dir=table._folder) as images, loop_disk(Path(images)) as disk:
        options = ("--disk", str(disk.folder), "--disk-size", "64MiB")
        files = disk.folder / "kvstow"
        files.mkdir(mode=0o700)
        (files / "records").write_bytes(b"something else" * 1000)
        (files / "records").chmod(0o600)
        with table.service(*options) as (_, client, _folder):
            table.told("a disk has foreign files", client, "disk_ready")
        (files / "records").write_bytes(b"")
        with (files / "records").open("rb") as records:
            fcntl.flock(records, fcntl.LOCK_EX)
            with table.service(*options) as (_, client, _folder):
                table.told("another process has the files of a disk", client, "disk_ready")
        table.refused("a disk is smaller than --disk-size", "--disk", str(disk.folder), "--disk-size", "10GiB")
        with table.service(*options) as (service, client, _folder):
            engine = RawEngine(service.socket)
            table.told("nothing names the weights of an engine", client, "tier_off", engine.step)
            engine.close()
            engine = RawEngine(service.socket, named)
            keys = keys_of(0, 40)

            def part() -> dict[str, Any]:
                (found,) = client.get("/v1/tier").json()["parts"]
                return dict(found)

            engine.store_until_found(keys)

            def is_written() -> bool:
                engine.use(keys)
                return bool(part()["counters"]["written_blocks"] >= len(keys))

            engine.wait_for(is_written)
            data = files / "data"
            with data.open("r+b") as changed:
                content = changed.read()
                changed.seek(0)
                changed.write(bytes(byte ^ 1 for byte in content))
            engine.scheduler.send(Prefill((0.01, 0.0, 0.0)))
            client.post(f"/v1/pools/{engine.welcome.pool}/evict", json={"slots": 40})
            table.told("bytes on a disk change", client, "disk_corrupt", lambda: engine.load(keys))
            disk.freeze()
            engine.store_until_found(keys_of(100, 40))
            engine.use(keys_of(100, 40))
            table.told("a disk hangs", client, "disk_stuck", engine.step)
            disk.thaw()
            engine.close()


def with_limits(table: Table) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"kvstow-faults-{os.getpid()}"
    if not group.parent.is_dir():
        print("no limit of a container: this needs the first version of cgroups")
        return
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(96 << 20))
        table.refused("a container has less memory than --memory", cgroup=group)
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
        with table.service("--memory", "128MiB", "--pin-pause", "100ms", cgroup=group) as (_, client, _folder):
            (group / "memory.limit_in_bytes").write_text(str(128 << 20))
            table.told("the limit of its container falls while memory is populated", client, "node_memory")
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text().split())
        group.rmdir()


def with_certificates(table: Table) -> None:
    certificate, key = table._folder / "tls.crt", table._folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "3", "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    with table.service("--tls-cert", str(certificate), "--tls-key", str(key)) as (_, client, _folder):
        table.told("the certificate expires in three days", client, "certificate")


PARTS = (
    with_a_keeper, with_engines, with_orphans, with_tokens, with_memory, with_disks, with_limits, with_certificates
)  # fmt: skip


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder))
        for part in PARTS:
            part(table)
    missing = [row.fault for row in table.rows if row.seconds is None]
    print(f"{len(table.rows) - len(missing)} of {len(table.rows)} faults were told", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
