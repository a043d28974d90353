"""A non-blocking Unix stream socket that carries frames and file descriptors.

Frames tell messages apart in a stream of bytes. A frame is a header of 16 bytes, little endian, and a payload: u32
length of the payload, u16 kind, u16 number of file descriptors that belong to it, u64 request id. An answer has the
request id of its request. The request id is 0 if no answer is expected, and in messages that answer no request.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvstow.errors import DisconnectedError, ProtocolError

MAX_PAYLOAD_BYTES = 8 << 20
"""The limit for a payload, in bytes. A lookup of 100,000 keys takes 3.6 MB."""
MAX_HELLO_BYTES = 64 << 10
"""The limit for the payload of the first frame, in bytes. It is small, because every process that can connect may send
such a frame. An engine with 80 layers in separate storages needs 7 KB, and 16 pipelined ranks with 126 layers 32 KB."""
MAX_FDS = 250
"""The limit for the file descriptors of one frame. The kernel passes up to 253 in one message."""
HEADER_BYTES = 16
"""The size of a frame's header."""
MAX_UNSENT_BYTES = MAX_PAYLOAD_BYTES + (1 << 20)
"""How many bytes may be queued for a peer that does not read: the largest frame and some small ones."""
MAX_UNSENT_FDS = 4096
"""How many copies of descriptors may be queued with them: those of 4 TiB in extents of 1 GiB."""
SCRATCH_BYTES = 256 << 10
"""How many bytes one `Channel.receive` reads at most."""

_HEADER = struct.Struct("<IHHQ")
_SOCKET_BUFFER_BYTES = 1 << 20
"""The size of the kernel's send buffer."""
_KERNEL_MAX_FDS = 253
_FD_SPACE = socket.CMSG_SPACE(_KERNEL_MAX_FDS * array("i").itemsize)
_BUFFERS_PER_CALL = 64
"""How many queued buffers one system call sends at most."""
_FDS_LOST = (
    "file descriptors were sent, but did not all arrive: either SELinux forbids passing them between the two processes "
    "(run both with the same level), or this process has reached its limit of open files"
)


class Frame(NamedTuple):
    """One message. The receiver owns `fds` and closes them."""

    kind: int
    request_id: int
    payload: bytes
    fds: tuple[int, ...] = ()


def encode_header(kind: int, payload_bytes: int, request_id: int = 0, num_fds: int = 0) -> bytes:
    """Return the header of a frame. Raises `ProtocolError` if a frame cannot have this many bytes or descriptors."""
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError("too_long", f"a payload has {payload_bytes} bytes; allowed: {MAX_PAYLOAD_BYTES}")
    if num_fds > MAX_FDS:
        raise ProtocolError("too_many_fds", f"a frame has {num_fds} file descriptors; allowed: {MAX_FDS}")
    return _HEADER.pack(payload_bytes, kind, num_fds, request_id)


class FrameDecoder:
    """Divides a stream into frames. Not thread-safe.

    It keeps at most one frame of `limit` bytes and the input of one `feed` call. It refuses a longer frame as soon as
    the header has arrived.
    """

    def __init__(self, limit: int = MAX_PAYLOAD_BYTES) -> None:
        self.limit = limit
        """The limit for a payload, in bytes. May be changed between calls."""
        self._rest = bytearray()

    @property
    def buffered(self) -> int:
        """How many bytes of an incomplete frame it keeps."""
        return len(self._rest)

    def feed(self, data: bytes | memoryview) -> list[tuple[Frame, int]]:
        """Return the frames that `data` completes, without their descriptors, and the number of descriptors of each.
        Raises `ProtocolError`. Do not call it again after that."""
        if not self._rest:
            frames, used = self._cut(memoryview(data))
            self._rest += data[used:]
            return frames
        self._rest += data
        with memoryview(self._rest) as view:
            frames, used = self._cut(view)
        if used:
            del self._rest[:used]
        return frames

    def _cut(self, view: memoryview) -> tuple[list[tuple[Frame, int]], int]:
        """Return the complete frames at the beginning of `view`, and the number of bytes that they take."""
        frames: list[tuple[Frame, int]] = []
        at, end = 0, len(view)
        while end - at >= HEADER_BYTES:
            length, kind, num_fds, request_id = _HEADER.unpack_from(view, at)
            if length > self.limit:
                raise ProtocolError("too_long", f"a frame of {length} bytes was announced; allowed here: {self.limit}")
            if num_fds > MAX_FDS:
                raise ProtocolError("too_many_fds", f"a frame announces {num_fds} file descriptors; allowed: {MAX_FDS}")
            begin = at + HEADER_BYTES
            if begin + length > end:
                break
            at = begin + length
            frames.append((Frame(kind, request_id, bytes(view[begin:at])), num_fds))
        return frames, at


class _Unsent(NamedTuple):
    """Bytes that are queued for the socket, and copies of the descriptors that go with the first byte."""

    data: bytes | memoryview
    fds: tuple[int, ...] = ()


class Channel:
    """Sends and receives frames over a connected Unix stream socket, which it owns. It never blocks, and only one
    thread uses it.

    Received descriptors are close-on-exec and belong to the frame that announced them. After an error, only `close` may
    be called.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        scratch: bytearray | None = None,
        accepts_fds: bool = False,
        limit: int = MAX_PAYLOAD_BYTES,
        max_unsent: int = MAX_UNSENT_BYTES,
    ) -> None:
        """`scratch` is a buffer that channels of one thread may share. Each call of `receive` overwrites it."""
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._socket = connected
        self._scratch = memoryview(scratch if scratch is not None else bytearray(SCRATCH_BYTES))
        self._decoder = FrameDecoder(limit)
        self._max_unsent = max_unsent
        self._fds: deque[int] = deque()
        """Received descriptors that belong to no complete frame yet."""
        self._unsent: deque[_Unsent] = deque()
        self.unsent_bytes = 0
        self._unsent_fds = 0
        self.accepts_fds = accepts_fds
        """Whether the other end may send descriptors. If not, the kernel discards them, and `receive` raises
        `ProtocolError`."""
        self.bytes_received = 0
        self.bytes_sent = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def buffered_bytes(self) -> int:
        """How many bytes of an incomplete frame have been received."""
        return self._decoder.buffered

    def set_limit(self, limit: int) -> None:
        """Change the limit for payloads that arrive from now on, in bytes."""
        self._decoder.limit = limit

    # -- receiving ------------------------------------------------------------------------------------------

    def receive(self) -> list[Frame]:
        """Return the frames that one read completes, often none. It reads at most `SCRATCH_BYTES`, so call it again
        while the socket is readable. Raises `DisconnectedError` at the end of the stream, and `ProtocolError`."""
        try:
            count = self._read()
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise DisconnectedError(f"the connection failed: {error.strerror}") from error
        if not count:
            raise DisconnectedError("the other end has closed the connection")
        self.bytes_received += count
        frames: list[Frame] = []
        try:
            for frame, num_fds in self._decoder.feed(self._scratch[:count]):
                frames.append(frame._replace(fds=self._take_fds(num_fds)) if num_fds else frame)
            if self._fds and (not self._decoder.buffered or len(self._fds) > MAX_FDS):
                raise ProtocolError("fds_unannounced", f"{len(self._fds)} file descriptors belong to no frame")
        except ProtocolError:
            for frame in frames:
                close_fds(frame.fds)
            raise
        return frames

    def _read(self) -> int:
        """Read bytes into the scratch buffer, and keep the descriptors that come with them. Returns the number of
        bytes. Raises `OSError`, and `ProtocolError` if descriptors were not passed on."""
        count, ancillary, flags, _ = self._socket.recvmsg_into(
            [self._scratch], _FD_SPACE if self.accepts_fds else 0, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(_descriptors(data))
        if flags & socket.MSG_CTRUNC:
            if not self.accepts_fds:
                raise ProtocolError("fds_unwanted", "file descriptors were sent where none are expected")
            raise ProtocolError("fds_lost", _FDS_LOST)
        return count

    def _take_fds(self, count: int) -> tuple[int, ...]:
        """Take the descriptors of a frame. All of them have arrived, because they travel with its first byte."""
        if len(self._fds) < count:
            raise ProtocolError("fds_missing", f"a frame announces {count} file descriptors; {len(self._fds)} came")
        return tuple(self._fds.popleft() for _ in range(count))

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, kind: int, payload: bytes = b"", request_id: int = 0, fds: Sequence[int] = ()) -> None:
        """Send a frame. Bytes that the socket does not take at once are queued for `flush`. The caller still owns its
        descriptors, and may close them.

        Raises `DisconnectedError`. Raises `ProtocolError` with reason `slow_reader` if the queue would become too long.
        """
        header = encode_header(kind, len(payload), request_id, len(fds))
        if self._unsent:
            size = HEADER_BYTES + len(payload)
            if self.unsent_bytes + size > self._max_unsent:
                raise ProtocolError("slow_reader", f"the other end has left {self.unsent_bytes} bytes unread")
            if self._unsent_fds + len(fds) > MAX_UNSENT_FDS:
                raise ProtocolError("slow_reader", f"the other end has left {self._unsent_fds} descriptors unread")
            self._queue(_Unsent(header, _duplicates(fds)), _Unsent(payload))
            self.flush()
            return
        sent = self._send_now([header, payload], fds)
        if sent < HEADER_BYTES:
            kept = () if sent else _duplicates(fds)
            self._queue(_Unsent(header[sent:], kept), _Unsent(payload))
        elif sent < HEADER_BYTES + len(payload):
            self._queue(_Unsent(memoryview(payload)[sent - HEADER_BYTES :]))

    def flush(self) -> bool:
        """Send queued bytes until the socket takes no more. Returns True if the queue is empty. Raises
        `DisconnectedError`."""
        while self._unsent:
            first = self._unsent[0]
            batch = [first.data]
            for later in islice(self._unsent, 1, _BUFFERS_PER_CALL):
                if later.fds:  # descriptors go with the first byte of their own frame
                    break
                batch.append(later.data)
            sent = self._send_now(batch, first.fds)
            if not sent:
                return False
            self._drop_sent(sent)
        return True

    def _queue(self, *parts: _Unsent) -> None:
        for part in parts:
            if part.data:
                self._unsent.append(part)
                self.unsent_bytes += len(part.data)
                self._unsent_fds += len(part.fds)

    def _drop_sent(self, sent: int) -> None:
        self.unsent_bytes -= sent
        self._unsent_fds -= len(self._unsent[0].fds)
        close_fds(self._unsent[0].fds)
        while sent:
            first = self._unsent.popleft()
            if len(first.data) > sent:
                self._unsent.appendleft(_Unsent(memoryview(first.data)[sent:]))
                return
            sent -= len(first.data)

    def _send_now(self, buffers: Sequence[bytes | memoryview], fds: Sequence[int]) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            sent = self._socket.sendmsg(buffers, ancillary, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise DisconnectedError(f"the connection failed: {error.strerror}") from error
        self.bytes_sent += sent
        return sent

    def close(self) -> None:
        """Close the socket and every descriptor queued in either direction. Idempotent."""
        self._socket.close()
        close_fds(self._fds)
        self._fds.clear()
        for part in self._unsent:
            close_fds(part.fds)
        self._unsent.clear()
        self.unsent_bytes = self._unsent_fds = 0


def close_fds(fds: Sequence[int] | deque[int]) -> None:
    """Close all these file descriptors."""
    for fd in fds:
        os.close(fd)


def duplicates_of(fds: Sequence[int]) -> list[int]:
    """Duplicate these file descriptors. If this process can have no more of them, it raises `OSError` and makes
    none."""
    copies = list[int]()
    try:
        copies.extend(map(os.dup, fds))
    except OSError:
        close_fds(copies)
        raise
    return copies


def _descriptors(data: bytes) -> array[int]:
    found = array("i")
    found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(duplicates_of(fds))
    except OSError as error:
        raise DisconnectedError(f"file descriptors cannot be kept until they are sent: {error.strerror}") from error
