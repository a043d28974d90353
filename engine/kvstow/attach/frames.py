"""Frames: how messages are told apart in a stream of bytes.

A frame is a header of 16 bytes, little endian, and a payload: u32 length of the payload, u16 kind, u16 number of file
descriptors that belong to it, u64 request id. An answer has the request id of its request; 0 means that no answer is
expected, or that none was asked for.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvstow.errors import ProtocolError

MAX_PAYLOAD_BYTES = 8 << 20
"""A lookup of 100,000 keys takes 3.4 MB."""
MAX_HELLO_BYTES = 256 << 10
"""The limit for the first frame, which anybody who can connect may send."""
MAX_FDS = 250
"""The limit for one frame. The kernel passes up to 253 in one message."""
HEADER_BYTES = 16

_HEADER = struct.Struct("<IHHQ")


class Frame(NamedTuple):
    """One message. The receiver owns `fds` and closes them."""

    kind: int
    request_id: int
    payload: bytes
    fds: tuple[int, ...] = ()


class RawFrame(NamedTuple):
    """A frame whose descriptors are not assigned yet."""

    kind: int
    num_fds: int
    request_id: int
    payload: bytes


def encode_header(kind: int, payload_bytes: int, request_id: int = 0, num_fds: int = 0) -> bytes:
    """Raises `ProtocolError` for a payload or a number of descriptors that no frame may have."""
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError("too_long", f"a payload has {payload_bytes} bytes; allowed: {MAX_PAYLOAD_BYTES}")
    if num_fds > MAX_FDS:
        raise ProtocolError("too_many_fds", f"a frame has {num_fds} file descriptors; allowed: {MAX_FDS}")
    return _HEADER.pack(payload_bytes, kind, num_fds, request_id)


class FrameDecoder:
    """Cuts a stream into frames. Not thread-safe.

    It holds at most one frame of `limit` bytes plus the input of one `feed` call. It refuses a longer frame as soon as
    the header has arrived.
    """

    def __init__(self, limit: int = MAX_PAYLOAD_BYTES) -> None:
        self.limit = limit
        """The limit for a payload, in bytes. May be changed between calls."""
        self._rest = bytearray()

    @property
    def buffered(self) -> int:
        """How many bytes of an incomplete frame are held."""
        return len(self._rest)

    def feed(self, data: bytes | memoryview) -> list[RawFrame]:
        """The frames that `data` completes. Raises `ProtocolError`; after that, do not call it again."""
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

    def _cut(self, view: memoryview) -> tuple[list[RawFrame], int]:
        """The whole frames at the beginning of `view`, and their length."""
        frames: list[RawFrame] = []
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
            frames.append(RawFrame(kind, num_fds, request_id, bytes(view[begin:at])))
        return frames, at
