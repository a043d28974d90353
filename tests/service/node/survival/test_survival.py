"""A service with real memory, a journal and a keeper is killed at random points; the next one has memory and index."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvstow_service.node.survival.survivingmemory import SurvivingMemory
from tests.service.node import survivor

from kvstow.errors import KeeperError
from kvstow_service.node.survival import survivingmemory
from kvstow_service.node.survival.keeperclient import KeeperClient

pytestmark = pytest.mark.process


def end_keeper(folder: Path, number: int = signal.SIGTERM) -> None:
    try:
        pid = KeeperClient.look(folder).pid
    except KeeperError:
        return
    pidfd = os.pidfd_open(pid)
    os.kill(pid, number)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A state folder; its keeper is ended after the test."""
    folder = tmp_path / "state"
    yield folder
    end_keeper(folder)


class Service:
    def __init__(self, folder: Path, environ: dict[str, str], seed: int, order: str = "") -> None:
        command = [sys.executable, survivor.__file__, str(folder), str(seed), order]
        self._process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    def read(self) -> list[int]:
        """The numbers of its next line."""
        assert self._process.stdout is not None
        return [int(word) for word in self._process.stdout.readline().split()]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_memory_and_index_survive_kills_at_random_points(folder: Path, child_environ: dict[str, str]) -> None:
    """Each service verifies every recovered block by its bytes, then stores and evicts until it is killed. It prints
    how many blocks it has recovered, how many of those were wrong and the bytes of all memory, then its blocks now."""
    chance = random.Random(1)
    last = 0
    for seed in range(6):
        service = Service(folder, child_environ, seed)
        recovered, wrong, num_bytes = service.read()
        assert wrong == 0
        assert num_bytes <= survivor.TOTAL_BYTES, "there is never a second pool"
        assert recovered >= last - survivor.MOST_AT_ONCE, "but for the operation that was cut off"
        for _ in range(chance.randrange(5, 60)):
            (last,) = service.read()
        service.kill()
        last -= survivor.MOST_AT_ONCE  # it may have evicted since its last line
    assert last > 0


@pytest.mark.parametrize(("order", "wrong"), [("late", 0), ("early", survivor.MOST_AT_ONCE)])
def test_a_block_is_journaled_only_when_every_rank_has_its_bytes(
    folder: Path, child_environ: dict[str, str], order: str, wrong: int
) -> None:
    """A service that journals it before is found out by the bytes that the next one reads."""
    killed = Service(folder, child_environ, 0, order)
    killed.read()
    assert killed.read() == [survivor.MOST_AT_ONCE]
    killed.kill()
    following = Service(folder, child_environ, 1)
    assert following.read()[:2] == [survivor.MOST_AT_ONCE + wrong, wrong]
    following.kill()


def test_a_keeper_that_is_killed_beside_the_service_loses_nothing(folder: Path) -> None:
    memory = SurvivingMemory(folder, 600)
    fd = os.memfd_create("kvstow-extent")
    memory.put({"extent-1": (fd, "a"), "extent-2": (fd, "b")})
    end_keeper(folder, signal.SIGKILL)
    memory.drop(["extent-2"])
    assert KeeperClient.look(folder).infos == {"extent-1": "a"}
    end_keeper(folder, signal.SIGKILL)
    memory.check()
    assert KeeperClient.look(folder).infos == {"extent-1": "a"}
    assert (memory.restarts, memory.notice) == (2, None)
    memory.check()
    assert memory.restarts == 2
    memory.end()
    os.close(fd)


@pytest.mark.parametrize(
    "error", [BlockingIOError(errno.EAGAIN, "no processes left"), subprocess.TimeoutExpired("no processes left", 10)]
)
def test_without_a_keeper_the_service_goes_on_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise error

    memory = SurvivingMemory(folder, 600)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", refuse)
        end_keeper(folder, signal.SIGKILL)
        memory.check()
        fd = os.memfd_create("kvstow-extent")
        memory.put({"extent-1": (fd, "")})
        assert "no processes left" in str(memory.notice)
        with pytest.raises(KeeperError, match="no processes left"):
            memory.take_all()
    memory.check()
    assert memory.notice is None
    assert KeeperClient.look(folder).infos == {"extent-1": ""}
    memory.leave()
    memory.end()
    os.close(fd)


@pytest.fixture
def start_elsewhere(folder: Path, child_environ: dict[str, str]) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    keepers = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvstow_service", "keeper", "--state", str(folder), "--keep-timeout", "10min"]
        keepers.append(subprocess.Popen(command, env=child_environ))
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.kill()
        keeper.wait()


def found_by(memory: SurvivingMemory) -> bool:
    memory.check()
    return memory.notice is None


def test_a_service_waits_for_a_keeper_that_others_start_and_starts_none(
    folder: Path, start_elsewhere: Callable[[], subprocess.Popen[bytes]], eventually: Any
) -> None:
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(SurvivingMemory, folder, None)
        eventually(folder.exists)
        assert not connecting.done()
        keeper = start_elsewhere()
        memory = connecting.result(60)
    assert KeeperClient.look(folder).pid == keeper.pid, "`kvstow keeper` becomes the keeper"
    fd = os.memfd_create("kvstow-extent")
    memory.put({"extent-1": (fd, "a")})
    keeper.kill()
    keeper.wait()
    memory.check()
    memory.check()
    assert "there is no keeper" in str(memory.notice)
    with pytest.raises(KeeperError, match="no keeper answers"):
        KeeperClient.look(folder)

    keeper = start_elsewhere()
    eventually(lambda: found_by(memory))
    listing = KeeperClient.look(folder)
    assert (listing.pid, listing.infos) == (keeper.pid, {"extent-1": "a"})
    memory.end()
    os.close(fd)
    assert KeeperClient.look(folder).infos == {}
    assert keeper.poll() is None, "it waits for the next service"


def test_a_keeper_that_does_not_come_is_an_error_that_names_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivingmemory, "_WAIT_SECONDS", 0)
    with pytest.raises(KeeperError, match=f"no keeper answers in {folder}"):
        SurvivingMemory(folder, None)


def test_what_was_left_on_purpose_is_there_for_the_next_service(folder: Path) -> None:
    first = SurvivingMemory(folder, 600)
    fd = os.memfd_create("kvstow-extent")
    first.put({"extent-1": (fd, "a")})
    os.close(fd)
    first.leave()
    second = SurvivingMemory(folder, 600)
    taken = second.take_all()
    assert {name: held.info for name, held in taken.items()} == {"extent-1": "a"}
    end_keeper(folder, signal.SIGKILL)
    second.check()
    assert KeeperClient.look(folder).infos == {"extent-1": "a"}, "what was taken is put again"
    second.end()
    for held in taken.values():
        os.close(held.fd)
