"""The base of all messages: their kinds, which side sends them, and the limits of their values.

A message is a msgspec struct. Its types say what may be in it, and msgspec packs, unpacks and checks it. No message can
name code, and every length has a limit.

Both ends of a connection have the same version of the protocol. Any change of a message makes a new version, and a
service refuses engines of another version. For that, every version has the same frame header, the messages `HELLO` and
`REFUSED` in JSON, and the field `version` in a hello.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvstow.collector import unvisited
from kvstow.errors import InvalidRequestError, ProtocolError
from kvstow.plaintext import MOST_NAME, MOST_TEXT, is_plain, plain

Role = Literal["scheduler", "worker"]
Sender = Literal["scheduler", "worker", "service"]


VERSION: Final = 9

CONTENT_TYPE: Final = "application/msgpack"
"""The content type of a packed message in a request over HTTP, and of its answer."""


class Kind(IntEnum):
    """The kind of a frame. It tells which message the frame holds."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ERROR = 4
    DETACH = 5

    LOOKUP = 16
    FOUND = 17
    RELEASE = 18
    BEGIN_LOAD = 19
    LOAD_BEGUN = 20
    BEGIN_STORE = 21
    STORE_BEGUN = 22
    COMPLETIONS = 23
    SETTLED = 24
    ADMIT = 25
    COUNT_LOOKUP = 26
    RESET = 27
    RESET_DONE = 28
    READ_EVENTS = 29
    EVENTS = 30
    PENDING = 31
    PREFILL = 32
    LOOKUP_PROMPT = 33
    END = 34
    DESCRIBE_STORE = 35

    REPORT = 48
    DESIRED = 49
    EXTENTS = 50
    POPULATED = 51
    REGISTERED = 52
    REVOKED = 53
    RELEASED = 54


_OF_ENGINES = {Kind.HELLO, Kind.DETACH, Kind.COMPLETIONS}
_OF_WORKERS = {Kind.REPORT, Kind.REGISTERED, Kind.RELEASED}
_CALLS = {Kind.LOOKUP, Kind.LOOKUP_PROMPT, Kind.RELEASE, Kind.BEGIN_LOAD, Kind.BEGIN_STORE, Kind.ADMIT, Kind.END}
_CALLS |= {Kind.COUNT_LOOKUP, Kind.RESET, Kind.READ_EVENTS, Kind.PREFILL, Kind.DESCRIBE_STORE}
SENT_BY: Final[Mapping[Sender, frozenset[Kind]]] = {
    "scheduler": frozenset(_OF_ENGINES | _CALLS),
    "worker": frozenset(_OF_ENGINES | _OF_WORKERS),
    "service": frozenset(set(Kind) - _OF_ENGINES - _OF_WORKERS - _CALLS),
}


def refusal_of(kind: int, sender: Sender, num_fds: int = 0) -> str | None:
    """Say why this sender must not send such a frame, or return None if it may. Only `EXTENTS` carries descriptors."""
    if kind not in SENT_BY[sender]:
        if kind not in set(Kind):
            return f"kind {kind} does not exist"
        return f"{Kind(kind).name} does not come from a {sender}"
    if num_fds and kind != Kind.EXTENTS:
        return f"{Kind(kind).name} came with {num_fds} file descriptors"
    return None


MOST_ITEMS = 1 << 16
"""The limit for the items of any list: a million tokens in blocks of 16."""
_PIECE = 1024
"""Keys that are unpacked in one call of C, which keeps all other threads waiting: for 4 ms with `MOST_ITEMS` keys."""
_MOST_BESIDE_KEYS = 4096
"""Bytes of a message with lists of keys, without these."""
MOST_STORED = 256
"""The limit for the blocks of one store, because one call plans all of them, and one call ends them."""
MOST_COMPLETIONS = 1024
"""The limit for the completions in one message, because one call of C unpacks all of them."""
MOST_ERROR = MOST_NAME
"""The limit for the characters of a completion's error."""
MOST_LISTED = 4096
"""The limit for the items of a list that is shown to people, or that the receiver keeps."""

U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
U64 = Annotated[int, Meta(ge=0)]
"""An integer in MessagePack, which has none of more than 64 bits."""
Whole = Annotated[int, Meta(ge=0, le=1 << 62)]
"""An integer in JSON, which has integers of any size, so this one has a limit."""
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]
Name = Annotated[str, Meta(max_length=MOST_NAME)]
Key = Annotated[bytes, Meta(min_length=1, max_length=256)]
Keys = Annotated[Sequence[Key], Meta(max_length=MOST_ITEMS)]
StoredKeys = Annotated[Sequence[Key], Meta(max_length=MOST_STORED)]
U32s = Annotated[tuple[U32, ...], Meta(max_length=MOST_ITEMS)]
U64s = Annotated[tuple[U64, ...], Meta(max_length=MOST_LISTED)]
Runs = Annotated[tuple[tuple[U32, U32], ...], Meta(max_length=MOST_ITEMS)]
Digest = Annotated[bytes, Meta(max_length=8)]
Counts = Annotated[dict[Name, U32], Meta(max_length=64)]


class Message(Struct, frozen=True):
    """A message in JSON. Its fields have names, so another version of the protocol can read those that it needs."""

    KIND: ClassVar[Kind]
    MOST_BYTES: ClassVar[int] = 64 << 10
    """The limit for the payload that an engine or a worker sends, in bytes, because one call of C unpacks it. Lists of
    keys do not count, because they are unpacked in pieces."""

    def pack(self) -> bytes:
        """Return the payload of the message's frame."""
        # msgspec's own JSON raises an error for half a surrogate, as in a path that is no UTF-8. With this one, the
        # service refuses such a text, and the engine continues.
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a message from a payload. Raises `ProtocolError` with reason `malformed` if it is no such message."""
        steps = cls.unpack_in_steps(payload)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                found: Self = ended.value
                return found

    @classmethod
    def unpack_in_steps(cls, payload: bytes) -> Generator[None, None, Self]:
        """`unpack`, in steps that are over soon."""
        yield from ()
        cls._check_length(payload)
        return cls._unpack_whole(payload)

    @classmethod
    def _check_length(cls, payload: bytes) -> None:
        if len(payload) > cls.MOST_BYTES and cls.KIND not in SENT_BY["service"]:
            words = f"{cls.KIND.name.lower()}: {len(payload)} bytes; allowed: {cls.MOST_BYTES}"
            raise ProtocolError("malformed", words)

    @classmethod
    def _unpack_whole(cls, payload: bytes) -> Self:
        fields = cls.__struct_fields__ if issubclass(cls, Packed) else ()
        found: Self = decoded(_reader(cls), payload, cls.KIND.name.lower(), fields)
        return found

    def check(self) -> None:
        """Check a received message. Raises `ValueError` for values that its types cannot exclude."""
        require_plain(self, "it")


class Packed(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message in MessagePack, as an array of its fields. With lists of keys, it is an array of the message without
    them, packed, and of their pieces, packed, too."""

    def pack(self) -> bytes:
        """Return the payload of the message's frame. Raises `ProtocolError` for a value that cannot be sent."""
        names = _key_lists(type(self))
        try:
            if not names:
                return _encode(self)
            lists = [_packed_in_pieces(getattr(self, name)) for name in names]
            return _encode((_encode(msgspec.structs.replace(self, **dict.fromkeys(names, ()))), *lists))
        except (UnicodeError, OverflowError) as error:
            raise ProtocolError("malformed", f"{self.KIND.name.lower()}: {error}") from error

    @classmethod
    def unpack_in_steps(cls, payload: bytes) -> Generator[None, None, Self]:
        names, what = _key_lists(cls), cls.KIND.name.lower()
        if not names:
            return (yield from super().unpack_in_steps(payload))
        rest, *lists = decoded(_splitter(len(names)), payload, what)
        message = cls._unpack_whole(rest)
        for name, pieces in zip(names, lists, strict=True):
            keys: list[bytes] = unvisited([])
            for piece in pieces:
                keys += decoded(_read_piece, piece, f"{what}: {name}")
                yield
            msgspec.structs.force_setattr(message, name, keys)
        return message

    def check(self) -> None:
        """Accept any text, because the texts of a packed message are made plain where they are shown."""


class PackedPart(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a packed message, which is sent as an array of its fields."""


@cache
def _key_lists(kind: type[Packed]) -> tuple[str, ...]:
    """The fields that may have many keys."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type == Keys)


def _packed_in_pieces(keys: Sequence[bytes]) -> list[bytes]:
    return [_encode(keys[start : start + _PIECE]) for start in range(0, len(keys), _PIECE)]


@cache
def _splitter(num_lists: int) -> Callable[[bytes], Any]:
    rest = Annotated[bytes, Meta(max_length=_MOST_BESIDE_KEYS)]
    pieces = Annotated[tuple[bytes, ...], Meta(max_length=MOST_ITEMS // _PIECE)]
    return msgspec.msgpack.Decoder(tuple[(rest, *[pieces] * num_lists)]).decode  # type: ignore[misc]


_encode = msgspec.msgpack.Encoder().encode
_read_piece = msgspec.msgpack.Decoder(Annotated[list[Key], Meta(max_length=_PIECE)]).decode
_T = TypeVar("_T")
_MOST_COMPLAINT = 500
"""How many characters of msgspec's complaint about a message an error quotes."""
_PLACE = re.compile(r"`\$\[([0-9]{1,4})\]([^`]*)`\Z")
"""The field that msgspec names at the end of a complaint. The text before it may quote the peer."""


def decoded(read: Callable[[bytes], _T], payload: bytes, what: str, fields: Sequence[str] = ()) -> _T:
    """Read a payload with `read`. All messages of a peer are read here, so every error becomes a `ProtocolError`, which
    names the message (`what`) and the field. `fields` are the names of an array's fields. For bad UTF-8, msgspec raises
    an error of Python."""
    try:
        return read(payload)
    except (msgspec.MsgspecError, InvalidRequestError, ValueError, RecursionError) as error:
        problem = str(error)
        place = _PLACE.search(problem) if isinstance(error, msgspec.ValidationError) else None
        if place is not None and int(place[1]) < len(fields):
            problem = f"{problem[: place.start()]}`$.{fields[int(place[1])]}{place[2]}`"
        raise ProtocolError("malformed", f"{what}: {plain(problem, _MOST_COMPLAINT)}") from error


@cache
def _reader(kind: type[Message]) -> Callable[[bytes], Any]:
    """Return a function that decodes and checks messages of this type."""
    decode = (msgspec.msgpack if issubclass(kind, Packed) else msgspec.json).Decoder(kind).decode

    def read(payload: bytes) -> Message:
        message: Message = decode(payload)
        message.check()
        return message

    return read


def read_value(value: Any, kind: type[_T], what: str) -> _T:
    """Make a value of this kind from the result of `msgspec.to_builtins`. Raises `InvalidRequestError`, which begins
    with `what`."""
    try:
        found = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{what}: {plain(str(error), _MOST_COMPLAINT)}") from error
    require_plain(found, what)
    return found


def require_plain(value: Any, at: str) -> None:
    """Raise `InvalidRequestError`, which names the field, if a text has unprintable characters."""
    if isinstance(value, str):
        if not is_plain(value):
            raise InvalidRequestError(f"{at} is {ascii(value)[:100]}; allowed: printable characters")
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            require_plain(one, f"{at}[{number}]")
    else:
        for name in getattr(value, "__struct_fields__", ()):
            require_plain(getattr(value, name), f"{at}.{name}")
