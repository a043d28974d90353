"""The doctor finds memory that no service uses, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.node.keepers import end_keeper
from tests.service.node.survival.test_keeperprocess import start

from kvstow.memory.extents import Extent
from kvstow_api.directory import OrphanedMemory
from kvstow_service.node.survival import orphanedmemory
from kvstow_service.node.survival.keeper import PROCESS_NAME
from kvstow_service.node.survival.orphanedmemory import find_orphaned_memory, running_services

pytestmark = pytest.mark.process

MAPPER = """
import ctypes, os, sys
mmap = ctypes.CDLL(None).mmap
mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
mmap(None, 2 << 20, 1, 1, int(sys.argv[1]), 0)
os.close(int(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def extent() -> Iterator[Extent]:
    """2 MiB, of which one page is there."""
    extent = Extent.create(2 << 20)
    os.pwrite(extent.fd, b"x", 0)
    yield extent
    extent.close()


def found(*in_use: int) -> dict[int, OrphanedMemory]:
    """By process."""
    return {one.pid: one for one in find_orphaned_memory(in_use)}


def test_memory_of_a_running_service_is_no_orphan_whoever_else_has_it(extent: Extent) -> None:
    mine = found()[os.getpid()]
    assert (mine.extents, mine.num_bytes > 0) == (1, True)
    assert os.getpid() not in found(os.getpid())


def test_what_a_keeper_holds_is_no_orphan_whosever_keeper_it_is(tmp_path: Path, extent: Extent) -> None:
    """An operator who ends it as an orphan takes the cache of a service that is about to come back."""
    client = start(tmp_path / "state")
    client.put({"extent-1": extent.fd})
    pid = client.pid
    try:
        client.leave()
        extent.close()
        assert pid in found()
        assert pid in running_services()
        assert pid not in found(*running_services())
    finally:
        end_keeper(tmp_path / "state")


def test_an_engine_that_has_mapped_it_only_is_named(extent: Extent) -> None:
    os.set_inheritable(extent.fd, True)
    command = [sys.executable, "-c", MAPPER, str(extent.fd)]
    with subprocess.Popen(
        command, pass_fds=[extent.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        assert engine.pid not in found(os.getpid())
        extent.close()
        orphan = found(os.getpid())[engine.pid]
        assert orphan.num_bytes == 0
        assert orphan.extents == 1
        engine.communicate()
    assert engine.pid not in found()


def test_services_of_the_machine_are_known_by_their_command_lines_and_keepers_by_their_names(tmp_path: Path) -> None:
    lines = {
        1: ["/usr/bin/python", "-m", "kvstow_service", "serve", "--memory", "1GiB"],
        2: ["/usr/local/bin/kvstow", "serve", "--memory=1GiB"],
        3: ["/usr/local/bin/vllm", "serve", "model", '{"kv_connector_module_path": "kvstow_service.connectors.vllm"}'],
        6: ["/usr/bin/python", "/opt/kvstow_service/__main__.py", "serve"],
        4: ["/usr/bin/python", "-m", "kvstow_service.node.survival.keeper"],
    }
    for pid, line in lines.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text("\0".join(line) + "\0")
    (tmp_path / "5").mkdir()  # it has ended
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "comm").write_text(f"{PROCESS_NAME}\n")
    (tmp_path / "meminfo").write_text("")
    assert running_services(proc=tmp_path) == sorted({1, 2, 6, 7, os.getpid()})


def test_an_extent_that_a_service_makes_during_the_look_is_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, keeper = 1, 2
    for pid in (service, keeper):
        (tmp_path / str(pid)).mkdir()
    looks: list[str] = []

    def look(process: Path) -> dict[tuple[int, int], int]:
        """The first look comes to the service before it has the extent, and to its keeper afterwards."""
        looks.append(process.name)
        return {} if process.name == str(service) and looks.count(process.name) == 1 else {(0, 7): 4096}

    monkeypatch.setattr(orphanedmemory, "extents_of", look)
    assert find_orphaned_memory([service], proc=tmp_path) == []
    assert looks.count(str(keeper)) == 2
    assert [one.num_bytes for one in find_orphaned_memory([], proc=tmp_path)] == [4096, 0]


def test_an_extent_that_several_processes_have_is_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extents = {"1": {(0, 7): 0}, "2": {(0, 7): 4096, (0, 8): 4096}, "3": {(0, 8): 4096}}  # the first has only mapped it
    for pid in extents:
        (tmp_path / pid).mkdir()
    monkeypatch.setattr(orphanedmemory, "extents_of", lambda process: extents[process.name])
    orphans = find_orphaned_memory([], proc=tmp_path)
    assert [one.num_bytes for one in orphans] == [0, 8192, 0]
