"""What messages consist of: their kinds, and the packing of keys, texts, numbers and JSON objects.

Both ends of a connection have the same version of the protocol. Any change of a frame is a new version, and a service
refuses engines of another one. For that, every version has the same frame header, the kinds `HELLO` and `REFUSED`, and
the field `version` of a hello.

Values lie in a payload little endian, without gaps. Lists and texts start with their length. Values of a JSON object
are checked before they are used, and unknown ones are ignored.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from kvstow.errors import InvalidRequestError, ProtocolError
from kvstow.plaintext import MOST_TEXT, is_plain, plain

Role = Literal["scheduler", "worker"]
Sender = Literal["scheduler", "worker", "service"]


VERSION: Final = 1


class Kind(IntEnum):
    """What a frame is."""

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
    REFRESH = 25
    COUNT_LOOKUP = 26
    RESET = 27
    RESET_DONE = 28
    READ_EVENTS = 29
    EVENTS = 30
    PENDING = 31
    PREFILL = 32
    LOOKUP_PROMPT = 33

    REPORT = 48
    DESIRED = 49
    EXTENTS = 50
    POPULATED = 51
    REGISTERED = 52
    REVOKED = 53
    LET_GO = 54


class Rule(NamedTuple):
    """Who sends a kind. With `takes_fds`, frames of the kind may carry descriptors."""

    senders: frozenset[Sender]
    takes_fds: bool = False


_SCHEDULER: frozenset[Sender] = frozenset({"scheduler"})
_WORKER: frozenset[Sender] = frozenset({"worker"})
_CLIENT = _SCHEDULER | _WORKER
_SERVICE: frozenset[Sender] = frozenset({"service"})

RULES: Final[dict[int, Rule]] = {
    Kind.HELLO: Rule(_CLIENT),
    Kind.WELCOME: Rule(_SERVICE),
    Kind.REFUSED: Rule(_SERVICE),
    Kind.ERROR: Rule(_SERVICE),
    Kind.DETACH: Rule(_CLIENT),
    Kind.LOOKUP: Rule(_SCHEDULER),
    Kind.FOUND: Rule(_SERVICE),
    Kind.RELEASE: Rule(_SCHEDULER),
    Kind.BEGIN_LOAD: Rule(_SCHEDULER),
    Kind.LOAD_BEGUN: Rule(_SERVICE),
    Kind.BEGIN_STORE: Rule(_SCHEDULER),
    Kind.STORE_BEGUN: Rule(_SERVICE),
    Kind.COMPLETIONS: Rule(_CLIENT),
    Kind.SETTLED: Rule(_SERVICE),
    Kind.REFRESH: Rule(_SCHEDULER),
    Kind.COUNT_LOOKUP: Rule(_SCHEDULER),
    Kind.RESET: Rule(_SCHEDULER),
    Kind.RESET_DONE: Rule(_SERVICE),
    Kind.READ_EVENTS: Rule(_SCHEDULER),
    Kind.EVENTS: Rule(_SERVICE),
    Kind.PENDING: Rule(_SERVICE),
    Kind.PREFILL: Rule(_SCHEDULER),
    Kind.LOOKUP_PROMPT: Rule(_SCHEDULER),
    Kind.REPORT: Rule(_WORKER),
    Kind.DESIRED: Rule(_SERVICE),
    Kind.EXTENTS: Rule(_SERVICE, takes_fds=True),
    Kind.POPULATED: Rule(_SERVICE),
    Kind.REGISTERED: Rule(_WORKER),
    Kind.REVOKED: Rule(_SERVICE),
    Kind.LET_GO: Rule(_WORKER),
}


def refusal_of(kind: int, sender: Sender, num_fds: int = 0) -> str | None:
    """Why this frame must not be sent, or None if it may."""
    rule = RULES.get(kind)
    if rule is None:
        return f"kind {kind} does not exist"
    if sender not in rule.senders:
        return f"{Kind(kind).name} does not come from a {sender}"
    if num_fds and not rule.takes_fds:
        return f"{Kind(kind).name} came with {num_fds} file descriptors"
    return None


MAX_KEY_BYTES = 256
MAX_TEXT_BYTES = 4096

_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_KEYS = struct.Struct("<HI")


def pack_text(text: str) -> bytes:
    """u16 length and UTF-8. Text longer than `MAX_TEXT_BYTES` is cut."""
    data = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    return _U16.pack(len(data)) + data


def pack_u32s(values: Sequence[int]) -> bytes:
    """u32 count and u32s. Raises `ProtocolError` for a value that does not fit."""
    try:
        return struct.pack(f"<I{len(values)}I", len(values), *values)
    except struct.error as error:
        raise ProtocolError("malformed", f"a list holds a value that is no 32-bit number: {error}") from error


def pack_u64s(values: Sequence[int]) -> bytes:
    """u32 count and u64s. Raises `ProtocolError` for a value that does not fit."""
    try:
        return _U32.pack(len(values)) + struct.pack(f"<{len(values)}Q", *values)
    except struct.error as error:
        raise ProtocolError("malformed", f"a list holds a value that is no 64-bit number: {error}") from error


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """u16 width, u32 count, and the keys joined. All keys of one engine have the same length. Raises `ProtocolError` if
    the total length, the first key or the last key contradicts that. Comparing all of 1,000 keys would take four times
    as long as the rest."""
    width = len(keys[0]) if keys else 0
    joined = b"".join(keys)
    if width * len(keys) != len(joined) or (keys and len(keys[-1]) != width):
        raise ProtocolError("malformed", "the keys of one message have different lengths")
    if keys and not 0 < width <= MAX_KEY_BYTES:
        raise ProtocolError("malformed", f"a key has {width} bytes; allowed: 1 to {MAX_KEY_BYTES}")
    return _KEYS.pack(width, len(keys)) + joined


def pack_rows(layout: struct.Struct, rows: Iterable[Sequence[Any]]) -> bytes:
    """u32 count and rows of one layout."""
    packed = [layout.pack(*row) for row in rows]
    return _U32.pack(len(packed)) + b"".join(packed)


@lru_cache(maxsize=8)
def _key_type(width: int) -> np.dtype[np.void]:
    return np.dtype(f"V{width}")  # S would strip zero bytes from the end


class PayloadReader:
    """Takes values from a payload, in order. Every method raises `ProtocolError` if the payload is too short or a value
    is impossible, before it allocates anything."""

    __slots__ = ("_at", "_data", "_what")

    def __init__(self, data: bytes, what: str) -> None:
        """`what`: the name of the message, for errors."""
        self._data = data
        self._at = 0
        self._what = what

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._data, self._advance(layout.size))

    def u32(self) -> int:
        value: int = self.fields(_U32)[0]
        return value

    def u64(self) -> int:
        value: int = self.fields(_U64)[0]
        return value

    def text(self) -> str:
        (length,) = self.fields(_U16)
        if length > MAX_TEXT_BYTES:
            raise self.error(f"a text of {length} bytes; allowed: {MAX_TEXT_BYTES}")
        begin = self._advance(length)
        return self._data[begin : begin + length].decode("utf-8", "replace")

    def u32s(self) -> tuple[int, ...]:
        count = self.u32()
        return struct.unpack_from(f"<{count}I", self._data, self._advance(4 * count))

    def u64s(self) -> tuple[int, ...]:
        count = self.u32()
        return struct.unpack_from(f"<{count}Q", self._data, self._advance(8 * count))

    def keys(self) -> list[bytes]:
        width, count = self.fields(_KEYS)
        if not count:
            return []
        if not 0 < width <= MAX_KEY_BYTES:
            raise self.error(f"keys of {width} bytes; allowed: 1 to {MAX_KEY_BYTES}")
        begin = self._advance(width * count)
        keys: list[bytes] = np.frombuffer(self._data, _key_type(width), count, begin).tolist()
        return keys

    def rows(self, layout: struct.Struct) -> Iterator[tuple[Any, ...]]:
        count = self.u32()
        begin = self._advance(layout.size * count)
        return layout.iter_unpack(memoryview(self._data)[begin : begin + layout.size * count])

    def end(self) -> None:
        """Raises `ProtocolError` if the payload does not end here."""
        if self._at != len(self._data):
            raise self.error(f"{len(self._data) - self._at} bytes too many")

    def error(self, problem: str) -> ProtocolError:
        return ProtocolError("malformed", f"{self._what}: {problem}")

    def _advance(self, size: int) -> int:
        begin = self._at
        if begin + size > len(self._data):
            raise self.error(f"{begin + size - len(self._data)} bytes too few")
        self._at = begin + size
        return begin


_MAX_ITEMS = 4096
_MAX_PAIRS_TEXT = 16 << 10  # the settings of an engine take 2 KB
_MAX_NUMBER = 1 << 62


def parse_object(payload: bytes, what: str) -> JsonObject:
    """Raises `ProtocolError` if the payload is not a JSON object."""
    try:
        return JsonObject(json.loads(payload), what)
    except (ValueError, RecursionError, InvalidRequestError) as error:
        raise ProtocolError("malformed", f"{what}: {error}") from error


class JsonObject:
    """Every method raises `InvalidRequestError`, which names the field, if the field is missing or has another type. If
    there is a default, it replaces a missing field and null."""

    __slots__ = ("_values", "_what")

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{what} is {_shown(value)}; allowed: an object")
        self._values: dict[str, Any] = value
        self._what = what

    def text(
        self, name: str, default: str | None = None, *, most: int = MOST_TEXT, allowed: tuple[str, ...] = ()
    ) -> str:
        """At most `most` characters, all of them printable."""
        value = self._value(name, default)
        if not is_plain(value, most):
            raise self._error(name, value, f"a text of at most {most} printable characters")
        if allowed and value not in allowed:
            raise self._error(name, value, ", ".join(allowed))
        return value

    def sentence(self, name: str) -> str:
        """A text for people, empty if it is missing; what cannot be printed in it becomes a space."""
        value = self._value(name, "")
        if type(value) is not str:
            raise self._error(name, value, "a text")
        return plain(value)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
            raise self._error(name, value, "a whole number, 0 or more")
        return value

    def optional_whole(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.whole(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self._error(name, value, "true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty if it is missing."""
        values = self._list(name)
        if not all(is_plain(value) for value in values):
            raise self._error(name, values, f"a list of texts of at most {MOST_TEXT} printable characters")
        return tuple(values)

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if it is missing."""
        values = self._list(name)
        if not all(type(value) is int and 0 <= value <= _MAX_NUMBER for value in values):
            raise self._error(name, values, "a list of whole numbers, 0 or more")
        return tuple(values)

    def text_pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        """An object of texts, as pairs in order of their names; empty if it is missing."""
        values = self._values.get(name)
        if values is None:
            return ()
        if type(values) is not dict or len(values) > _MAX_ITEMS:
            raise self._error(name, values, "an object of texts")
        if not all(is_plain(value) and is_plain(key, MOST_TEXT - len(value)) for key, value in values.items()):
            raise self._error(name, values, "an object of printable texts")
        if sum(len(key) + len(value) for key, value in values.items()) > _MAX_PAIRS_TEXT:
            raise self._error(name, values, f"texts of at most {_MAX_PAIRS_TEXT} characters together")
        return tuple(sorted(values.items()))

    def child(self, name: str) -> JsonObject:
        return JsonObject(self._value(name, None), f"{self._what}.{name}")

    def optional_child(self, name: str) -> JsonObject | None:
        return None if self._values.get(name) is None else self.child(name)

    def children(self, name: str) -> Iterator[JsonObject]:
        """A list of objects; empty if it is missing."""
        for number, value in enumerate(self._list(name)):
            yield JsonObject(value, f"{self._what}.{name}[{number}]")

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise InvalidRequestError(f"{self._what}.{name} is missing")
        return default

    def _list(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if values is None:
            return []
        if type(values) is not list or len(values) > _MAX_ITEMS:
            raise self._error(name, values, f"a list of at most {_MAX_ITEMS}")
        return values

    def _error(self, name: str, value: Any, allowed: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._what}.{name} is {_shown(value)}; allowed: {allowed}")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
