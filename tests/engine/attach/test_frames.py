"""A stream of bytes is cut into frames, in whatever pieces it comes, and never grows beyond one frame."""

from __future__ import annotations

import os
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.attach.channel import HEADER_BYTES, MAX_FDS, MAX_PAYLOAD_BYTES, Frame, FrameDecoder, encode_header
from kvstow.errors import ProtocolError


def encoded(frame: Frame, num_fds: int) -> bytes:
    return encode_header(frame.kind, len(frame.payload), frame.request_id, num_fds) + frame.payload


FRAMES = st.tuples(
    st.builds(Frame, st.integers(0, 2**16 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=100), st.just(())),
    st.integers(0, MAX_FDS),
)


def test_a_header_has_sixteen_bytes() -> None:
    assert encode_header(3, 5, 7, 2) == struct.pack("<IHHQ", 5, 3, 2, 7)
    assert len(encode_header(3, 5, 7, 2)) == HEADER_BYTES


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 60), max_size=40))
def test_frames_survive_any_cut_of_the_stream(frames: list[tuple[Frame, int]], cuts: list[int]) -> None:
    stream = b"".join(encoded(*frame) for frame in frames)
    decoder = FrameDecoder()
    found: list[tuple[Frame, int]] = []
    at = 0
    for length in cuts:
        found += decoder.feed(stream[at : at + length])
        at += length
    found += decoder.feed(memoryview(stream)[at:])
    assert found == frames
    assert decoder.buffered == 0


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_a_frame_a_refusal_or_half_a_frame(data: bytes) -> None:
    decoder = FrameDecoder(limit=1000)
    with suppress(ProtocolError):
        decoder.feed(data)
    assert decoder.buffered <= len(data)


def test_a_length_of_a_gibibyte_is_refused_at_the_header() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match="a frame of 1073741824 bytes was announced; allowed here: 8388608"):
        decoder.feed(struct.pack("<IHHQ", 1 << 30, 1, 0, 1))
    assert decoder.buffered == 0


def test_the_limit_can_be_raised_between_frames() -> None:
    decoder = FrameDecoder(limit=10)
    assert decoder.feed(encode_header(1, 10) + bytes(10)) != []
    decoder.limit = MAX_PAYLOAD_BYTES
    ((frame, _),) = decoder.feed(encode_header(1, MAX_PAYLOAD_BYTES) + bytes(MAX_PAYLOAD_BYTES))
    assert len(frame.payload) == MAX_PAYLOAD_BYTES
    with pytest.raises(ProtocolError, match="was announced"):
        FrameDecoder(limit=10).feed(encode_header(1, 11))


def test_what_is_buffered_is_at_most_one_frame() -> None:
    decoder = FrameDecoder(limit=1000)
    piece = encode_header(1, 1000) + os.urandom(500)
    decoder.feed(piece)
    assert decoder.buffered == HEADER_BYTES + 500
    assert len(decoder.feed(bytes(500) + piece)) == 1
    assert decoder.buffered == HEADER_BYTES + 500


def test_nothing_is_encoded_that_would_be_refused() -> None:
    with pytest.raises(ProtocolError, match="a payload has 8388609 bytes; allowed: 8388608"):
        encode_header(1, MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(ProtocolError, match="251 file descriptors; allowed: 250"):
        encode_header(1, 0, num_fds=MAX_FDS + 1)
    with pytest.raises(ProtocolError, match="announces 300 file descriptors"):
        FrameDecoder().feed(struct.pack("<IHHQ", 0, 1, 300, 1))
