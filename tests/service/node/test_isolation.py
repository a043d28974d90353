"""Users, pid namespaces and cgroups: who may attach, who shares, and who is charged for the memory."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.service.node.realservice import RealService
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

MIB = 1 << 20
ALICE, BOB, CAROL, ENGINES = 54321, 54322, 54323, 54399  # three users, and a group
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.current"),
)


class Cgroup:
    """A memory cgroup, of version 1 or 2. Skips the test where none can be made."""

    def __init__(self, name: str) -> None:
        for root, usage in _CGROUPS:
            self.path = root / f"kvstow-test-{os.getpid()}-{name}"
            try:
                self.path.mkdir()
            except OSError:
                continue
            self._usage = self.path / usage
            if self._usage.exists():
                return
            self.path.rmdir()
        pytest.skip("no memory cgroup can be made here")

    @property
    def used_bytes(self) -> int:
        return int(self._usage.read_text())

    def close(self) -> None:
        self.path.rmdir()


@pytest.fixture
def service() -> Iterator[RealService]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for its user
        path = Path(folder)
        path.chmod(0o711)  # others reach the socket's folder, which alone decides
        made = RealService(path)
        with made.running:
            yield made


@pytest.fixture
def make_cgroup(service: RealService) -> Callable[[str], Cgroup]:
    def make(name: str) -> Cgroup:
        cgroup = Cgroup(name)
        service.running.callback(cgroup.close)
        return cgroup

    return make


def test_only_the_services_user_and_the_group_may_attach(service: RealService) -> None:
    service.serve("--memory", "16MiB", "--extent-size", "2MiB", "--attach-group", str(ENGINES))
    _, stranger = service.engine("--uid", ALICE)
    assert "Permission denied" in stranger["problem"]
    _, member = service.engine("--uid", ALICE, "--group", ENGINES, "--store", 4, "--find", 4)
    assert (member["problem"], member["found"]) == (None, 4)
    _, same_user = service.engine("--store", 4, "--find", 4)
    assert (same_user["problem"], same_user["found"]) == (None, 4)


TIERED = ("--tier", "mooncake://store:1", "--memory", "64MiB", "--extent-size", "2MiB", "--attach-group", str(ENGINES))
WEIGHTS = ("--group", ENGINES, "--weights", "digest 1")


def test_a_tenant_neither_reads_nor_forges_blocks_of_another_one_through_the_fleet_tier(service: RealService) -> None:
    tenants = ("--tenant", f"one={ALICE}", "--tenant", f"two={BOB},{CAROL}")
    admin = service.serve(*TIERED, *tenants, module="tests.helm.tieredservice")
    service.engine("--uid", BOB, *WEIGHTS, "--forge", "--store", 8, "--find", 8)
    eventually(lambda: [one["counters"]["written_blocks"] for one in admin.get("/v1/tier").json()["items"]] == [9])
    _, carol = service.engine("--uid", CAROL, *WEIGHTS, "--forge", "--find", 8, "--wait")
    assert carol["found"] == 8, "what another user of the tenant has stored"
    _, alice = service.engine("--uid", ALICE, *WEIGHTS, "--find", 8)
    assert (alice["problem"], alice["found"]) == (None, 0)
    states = {one["pool"]: one["state"] for one in admin.get("/v1/tier").json()["items"]}
    assert (len(states), {*states.values()}) == (3, {"on"})


def test_who_keeps_memory_after_it_has_detached_is_named_with_the_command_that_ends_it(service: RealService) -> None:
    admin = service.serve("--memory", "16MiB", "--extent-size", "2MiB", "--attach-group", str(ENGINES))
    liar, seen = service.engine("--uid", BOB, "--group", ENGINES, "--one-rank", "--store", 200, "--leave")
    eventually(lambda: admin.get("/v1/sessions").json()["items"] == [])
    waiting = service.engine_later("--uid", ALICE, "--group", ENGINES, "--store", 8, "--find", 8)

    def command() -> str:
        found = admin.get("/v1/doctor").json()["conditions"]
        fixes = [one["fix"] for one in found if one["name"] == "memory_kept" and seen["session"] in one["what"]]
        return fixes[0] if fixes else ""

    eventually(lambda: f"`kvstow detach {seen['session']} --kill`" in command())
    assert admin.delete(f"/v1/sessions/{seen['session']}").status_code == 409
    assert admin.delete(f"/v1/sessions/{seen['session']}?kill=true").is_success
    assert liar.wait(60) == -signal.SIGKILL
    assert service.seen_by(waiting)["found"] == 8
    eventually(lambda: command() == "")


def test_a_service_in_a_pid_namespace_of_its_own_sees_engines_die(service: RealService) -> None:
    """As in containers: the engine's pid means nothing to the service."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    admin = service.serve("--memory", "16MiB", "--extent-size", "2MiB", prefix=prefix)
    engine, seen = service.engine("--store", 4)
    assert seen["problem"] is None
    (session,) = admin.get("/v1/sessions").json()["items"]
    assert session["state"] == "attached"
    engine.kill()
    eventually(lambda: admin.get("/v1/sessions").json()["items"] == [])
    _, successor = service.engine("--find", 4)
    assert successor["found"] == 4


def test_the_service_is_charged_for_the_memory_and_the_engine_is_not(
    service: RealService, make_cgroup: Callable[[str], Cgroup]
) -> None:
    memory = Path("/proc/meminfo").read_text()
    available = next(line for line in memory.splitlines() if line.startswith("MemAvailable"))
    if int(available.split()[1]) < 4 << 20:
        pytest.skip("needs 4 GiB of memory")
    ours, engines = make_cgroup("service"), make_cgroup("engines")
    admin = service.serve("--memory", "1GiB", cgroup=ours.path)
    eventually(lambda: admin.get("/v1/readiness").json()["memory"]["populated_bytes"] == 1024 * MIB, seconds=240)
    assert ours.used_bytes >= 1024 * MIB
    procs = engines.path / "cgroup.procs"
    _, small = service.engine("--cgroup", procs)
    assert small["problem"] is None
    before = engines.used_bytes
    _, seen = service.engine("--cgroup", procs, "--map", 512 * MIB)
    assert seen["problem"] is None
    grown = engines.used_bytes - before
    print(f"an engine and its two ranks, which have mapped 1 GiB, are charged {grown / MIB:.0f} MiB")
    assert grown <= 64 * MIB
