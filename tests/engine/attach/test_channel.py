"""Frames and descriptors over a real socket pair; no end ever blocks or leaks a descriptor."""

from __future__ import annotations

import os
import resource
import select
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.descriptors import all_closed_again, open_descriptors

from kvstow.attach import channel as channel_module
from kvstow.attach.channel import HEADER_BYTES, MAX_FDS, MAX_PAYLOAD_BYTES, Channel, Frame, encode_header
from kvstow.errors import DisconnectedError, ProtocolError


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    with all_closed_again():
        yield


@pytest.fixture
def sockets(no_descriptor_left: None) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def pair(sockets: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Channel, Channel]]:
    channels = Channel(sockets[0]), Channel(sockets[1], accepts_fds=True)
    yield channels
    for channel in channels:
        channel.close()
        channel.close()


def receive(channel: Channel, sender: Channel | None = None, count: int = 1) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        if sender is not None:
            sender.flush()
        assert select.select([channel], [], [], 10)[0]
        frames += channel.receive()
    return frames


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[int]]:
    """Descriptors of three files that hold their number."""
    fds = []
    for number in range(3):
        path = tmp_path / str(number)
        path.write_text(str(number))
        fds.append(os.open(path, os.O_RDONLY))
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[], None]]:
    """When it is called, the process may open one more descriptor until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower() -> None:
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, before[1]))

    yield lower
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def read_and_close(fds: tuple[int, ...]) -> list[str]:
    found = []
    for fd in fds:
        assert not os.get_inheritable(fd)
        found.append(os.pread(fd, 9, 0).decode())
        os.close(fd)
    return found


def test_descriptors_come_with_the_frame_that_announces_them(pair: tuple[Channel, Channel], files: list[int]) -> None:
    here, there = pair
    here.send(5, b"none")
    here.send(6, b"two", 1, files[:2])
    here.send(7, b"none")
    here.send(8, b"one", 2, files[2:])
    frames = receive(there, count=4)
    assert [frame.kind for frame in frames] == [5, 6, 7, 8]
    assert [read_and_close(frame.fds) for frame in frames] == [[], ["0", "1"], [], ["2"]]


def test_a_frame_that_does_not_fit_is_sent_bit_by_bit_with_its_descriptors(
    pair: tuple[Channel, Channel], files: list[int]
) -> None:
    here, there = pair
    payload = os.urandom(MAX_PAYLOAD_BYTES)
    here.send(1, payload, 1)
    here.send(2, b"late", 2, files)
    assert here.unsent_bytes
    assert not here.flush()
    frames = receive(there, here, 2)
    assert frames[0].payload == payload
    assert read_and_close(frames[1].fds) == ["0", "1", "2"]
    assert here.unsent_bytes == 0
    assert here.flush()
    assert there.buffered_bytes == 0


def test_descriptors_that_wait_are_closed_with_the_channel(pair: tuple[Channel, Channel], files: list[int]) -> None:
    here, _ = pair
    here.send(1, bytes(MAX_PAYLOAD_BYTES))
    before = open_descriptors()
    here.send(2, b"", 0, files)
    assert len(open_descriptors() - before) == 3
    here.close()
    assert len(before - open_descriptors()) == 1
    assert open_descriptors() <= before
    assert here.unsent_bytes == 0


def test_many_queued_frames_with_and_without_descriptors(pair: tuple[Channel, Channel], files: list[int]) -> None:
    here, there = pair
    here.send(9, bytes(MAX_PAYLOAD_BYTES - 1000))
    for number in range(200):
        here.send(number, str(number).encode(), number, files[:1] if number % 3 == 0 else ())
    frames = receive(there, here, 201)
    assert [frame.request_id for frame in frames[1:]] == list(range(200))
    assert [len(read_and_close(frame.fds)) for frame in frames[1:]] == [number % 3 == 0 for number in range(200)]


def test_a_reader_that_does_not_read_ends_the_channel_and_does_not_fill_memory(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    here = Channel(sockets[0], max_unsent=1 << 20)
    here.send(1, bytes(1 << 20))

    def send_on() -> None:
        for _ in range(3):
            here.send(1, bytes(900 << 10))

    with pytest.raises(ProtocolError, match="bytes unread") as caught:
        send_on()
    assert caught.value.reason == "slow_reader"
    assert here.unsent_bytes <= 1 << 20
    here.close()


def test_the_end_of_the_other_side_is_said_after_its_last_frame(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    here.send(1, b"last")
    here.close()
    assert there.receive() == [Frame(1, 0, b"last")]
    with pytest.raises(DisconnectedError, match="the other end has closed the connection"):
        there.receive()
    with pytest.raises(DisconnectedError, match="Broken pipe"):
        there.send(1)


def test_descriptors_where_none_are_expected_never_enter_the_process(
    pair: tuple[Channel, Channel], files: list[int]
) -> None:
    here, there = pair
    there.send(1, b"", 0, files)
    with (
        all_closed_again(),
        pytest.raises(ProtocolError, match="file descriptors were sent where none are expected") as caught,
    ):
        here.receive()
    assert caught.value.reason == "fds_unwanted"


def send_raw(sender: socket.socket, data: bytes, fds: list[int]) -> None:
    sender.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])


@pytest.mark.parametrize(
    ("announced", "sent", "reason"), [(2, 1, "fds_missing"), (0, 2, "fds_unannounced"), (1, 3, "fds_unannounced")]
)
def test_the_number_of_descriptors_must_be_the_announced_one(
    sockets: tuple[socket.socket, socket.socket], files: list[int], announced: int, sent: int, reason: str
) -> None:
    there = Channel(sockets[1], accepts_fds=True)
    send_raw(sockets[0], encode_header(1, 0, 0, announced), files[:sent])
    with pytest.raises(ProtocolError) as caught:
        there.receive()
    assert caught.value.reason == reason
    there.close()


def test_frames_of_the_same_read_lose_no_descriptor_when_a_later_one_is_wrong(
    sockets: tuple[socket.socket, socket.socket], files: list[int]
) -> None:
    there = Channel(sockets[1], accepts_fds=True)
    send_raw(sockets[0], encode_header(1, 0, 0, 2) + encode_header(2, 0, 0, 1), files[:2])
    with pytest.raises(ProtocolError):
        there.receive()
    there.close()  # `no_descriptor_left` counts


def test_half_a_frame_does_not_collect_descriptors_without_end(
    sockets: tuple[socket.socket, socket.socket], files: list[int]
) -> None:
    there = Channel(sockets[1], accepts_fds=True)
    sockets[0].send(encode_header(1, 1000, 0, MAX_FDS))

    def send_on() -> None:
        for _ in range(MAX_FDS):
            send_raw(sockets[0], b"x", files)
            there.receive()

    with pytest.raises(ProtocolError, match="belong to no frame"):
        send_on()
    there.close()


def test_lost_descriptors_are_explained(
    sockets: tuple[socket.socket, socket.socket], files: list[int], few_descriptors: Callable[[], None]
) -> None:
    there = Channel(sockets[1], accepts_fds=True)
    send_raw(sockets[0], encode_header(1, 0, 0, 3), files)
    few_descriptors()
    with pytest.raises(ProtocolError, match=r"SELinux forbids.*limit of open files") as caught:
        there.receive()
    assert caught.value.reason == "fds_lost"
    there.close()


def test_channels_of_one_thread_share_a_buffer(sockets: tuple[socket.socket, socket.socket]) -> None:
    scratch = bytearray(64)
    here, there = Channel(sockets[0], scratch=scratch), Channel(sockets[1], scratch=scratch)
    here.send(1, b"a" * 100, 1)
    there.send(2, b"b" * 100, 2)
    assert receive(there) == [Frame(1, 1, b"a" * 100)]
    assert receive(here) == [Frame(2, 2, b"b" * 100)]
    here.close()
    there.close()


def test_sending_costs_the_same_however_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(deque[Any]):
        looked_at = 0

        def __iter__(self) -> Iterator[Any]:
            for part in super().__iter__():
                Counted.looked_at += 1
                yield part

    ours, theirs = socket.socketpair()
    monkeypatch.setattr("kvstow.attach.channel.deque", Counted)
    channel = Channel(ours)
    while channel.unsent_bytes < 1000 * (HEADER_BYTES + 1):
        channel.send(5, b"x")
    Counted.looked_at = 0
    channel.send(5, b"x")
    assert Counted.looked_at <= 64
    channel.close()
    theirs.close()


def test_a_reader_that_does_not_read_does_not_take_all_descriptors(
    sockets: tuple[socket.socket, socket.socket], files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT_FDS", 10)
    here = Channel(sockets[0])
    before = open_descriptors()
    here.send(1, bytes(4 << 20))

    def send_on() -> None:
        for _ in range(30):
            here.send(1, b"", 0, files[:1])

    with pytest.raises(ProtocolError, match="has left 10 descriptors unread") as caught:
        send_on()
    assert caught.value.reason == "slow_reader"
    assert len(open_descriptors() - before) == 10
    here.close()
