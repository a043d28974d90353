from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.descriptors import all_closed_again

from kvstow.errors import ForeignMemoryError, PinError
from kvstow.memfd import (
    SEALS,
    create_memfd,
    identify_memfd,
    is_unsealed,
    populated_prefix,
    require_memfd,
    seal_writes,
)

MIB = 1 << 20
NAME = "kvstow-test"


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memfd(NAME, MIB)
    yield fd
    os.close(fd)


def test_its_size_is_fixed(fd: int) -> None:
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS


def test_the_kernel_says_when_no_process_maps_it_any_more(fd: int) -> None:
    """Another process, by a mapping alone."""
    code = "import mmap, sys, os; fd = int(sys.argv[1]); m = mmap.mmap(fd, 0); os.close(fd); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(fd)]
    mapper = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert mapper.stdout is not None
    mapper.stdout.readline()
    assert (seal_writes(fd), is_unsealed(fd)) == (False, True)
    mapper.communicate(b"\n")
    assert (seal_writes(fd), is_unsealed(fd)) == (True, False)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, MIB)


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, 0x10, fcntl.F_SEAL_SEAL])
def test_seals_that_a_client_adds_are_seen(fd: int, seal: int) -> None:
    assert is_unsealed(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    assert not is_unsealed(fd)
    with pytest.raises(ForeignMemoryError, match="the seals"):
        require_memfd(fd, NAME, MIB)


def test_it_is_closed_in_other_programs_and_only_its_uid_may_open_it(fd: int) -> None:
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_uid_cannot_open_a_read_only_descriptor_for_writing(fd: int) -> None:
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        command = ["/bin/sh", "-c", f"exec 9<>/proc/self/fd/{reader}"]
        result = subprocess.run(command, pass_fds=[reader], user=65534, group=65534, capture_output=True, text=True)
    finally:
        os.close(reader)
    assert "ermission denied" in result.stderr


def test_it_takes_no_memory_until_it_is_touched(fd: int) -> None:
    assert (os.fstat(fd).st_blocks, populated_prefix(fd)) == (0, 0)
    with mmap.mmap(fd, MIB) as memory:
        memory[0] = memory[mmap.PAGESIZE] = memory[3 * mmap.PAGESIZE] = 1
    assert populated_prefix(fd) == 2 * mmap.PAGESIZE


def test_kernels_that_do_not_know_the_flag_against_executing_make_it_without(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = os.memfd_create, []

    def old(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & 0x8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    fd = create_memfd(NAME, MIB)
    require_memfd(fd, NAME, MIB)
    os.close(fd)
    assert len(asked) == 2


@pytest.mark.parametrize(("reserved", "reason"), [(False, "out_of_memory"), (True, "hugepages")])
def test_a_refusal_has_a_reason_and_a_sentence(monkeypatch: pytest.MonkeyPatch, reserved: bool, reason: str) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(PinError, match=r"shared memory of 1 MiB: EMFILE \(Too many open files\)") as caught:
        create_memfd(NAME, MIB, reserved_huge_pages=reserved)
    assert caught.value.reason == reason


def test_a_failure_after_creating_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    with all_closed_again(), pytest.raises(PinError, match="EPERM"):
        create_memfd(NAME, MIB)


def test_its_own_memfd_is_recognized_across_duplicates(fd: int) -> None:
    other = os.dup(fd)
    require_memfd(other, NAME, MIB, identity=identify_memfd(fd))
    os.close(other)


def _unsealed() -> int:
    fd = os.memfd_create(NAME, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    os.fchmod(fd, 0o600)
    return fd


def _read_only_seal() -> int:
    fd = _unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    return fd


def _open_to_all() -> int:
    fd = create_memfd(NAME, MIB)
    os.fchmod(fd, 0o666)
    return fd


def _read_only() -> int:
    fd = create_memfd(NAME, MIB)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return reader


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_unsealed, "seals"),
        (_read_only_seal, "seals"),
        (_open_to_all, "mode 666"),
        (_read_only, "reading and writing"),
        (_pipe, "no memfd"),
        (lambda: os.open("/dev/null", os.O_RDWR), "no memfd"),
        (lambda: os.open("/etc/passwd", os.O_RDONLY), "no memfd|not a memfd"),
        (lambda: create_memfd(NAME, 2 * MIB), "2097152 bytes"),
        (lambda: create_memfd("other", MIB), "not a memfd with the name"),
    ],
)
def test_anything_else_is_refused_with_the_difference(make: Callable[[], int], what: str) -> None:
    fd = make()
    try:
        with pytest.raises(ForeignMemoryError, match=what):
            require_memfd(fd, NAME, MIB)
    finally:
        os.close(fd)


def test_an_equal_memfd_is_not_the_same_one(fd: int) -> None:
    other = create_memfd(NAME, MIB)
    with pytest.raises(ForeignMemoryError, match="another one"):
        require_memfd(other, NAME, MIB, identity=identify_memfd(fd))
    os.close(other)
