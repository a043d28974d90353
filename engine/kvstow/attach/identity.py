"""The identities that decide what engines share: that of a pool's memory, and that of the meaning of its keys.

Engines with equal pool identities share memory. If their namespace identities are also equal, they share blocks.
Everything that changes the meaning of a slot's bytes belongs in one of the two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields, force_setattr

from kvstow.attach.wire import MOST_LISTED, Text, Whole
from kvstow.plaintext import plain

SLOT_FORMAT = 1
"""The version of the way in which KVStow places pages in a slot (`KVLayout.offsets`)."""
DRAFTER_WEIGHTS: Final = "drafter_weights"
"""The setting of `NamespaceIdentity.value_settings` that names a drafter's weights on this node."""
_NAME_DIGITS = 6
"""How many hex digits of the digest are in the name of a pool or a namespace."""
_MAX_SLUG = 40
"""How many characters of the model's name the name of a pool or a namespace contains, at most."""
_MOST_SHOWN = 160
"""How many characters of a value are shown in the description of a difference."""

_Listed = Meta(max_length=MOST_LISTED)


class Identity(Struct, frozen=True, dict=True):
    """A set of plain values. Two identities are equal if their digests are equal."""

    def canonical_value(self) -> dict[str, Any]:
        """Return the values from which `canonical` is made. Their form is fixed, even if messages change."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @cached_property
    def canonical(self) -> bytes:
        """The same bytes for equal identities, in every version of Python: JSON with sorted names, ASCII only."""
        value = {"identity": type(self).__name__, **self.canonical_value()}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical).digest()

    def name(self, model: str) -> str:
        """Join the slug of `model` and six hex digits of the digest, as in `llama-3-1-8b-instruct-0a1b2c`."""
        return f"{slug(model)}-{self.digest.hex()[:_NAME_DIGITS]}"


class RegionIdentity(Struct, frozen=True):
    """Describes the pages of one region (layer) in a slot. `layout` is the arrangement of a page's bytes (shape and
    order)."""

    name: Text
    page_bytes: Whole
    layout: Text = ""


class GroupIdentity(Struct, frozen=True):
    """Describes a KV group: the kind of its KV, the tokens in a block, the tokens that a hash covers, and the window in
    tokens if it has one."""

    kind: Text
    block_tokens: Whole
    hash_tokens: Whole
    window: Whole | None = None


_Regions = Annotated[tuple[RegionIdentity, ...], _Listed]


class PoolIdentity(Identity, frozen=True):
    """Identifies a memory layout and its owner.

    `slot_bytes` is indexed by rank. `regions` are the regions of rank 0, in the order in which they lie in a slot.
    `other_regions` are the regions of the ranks that differ from rank 0 (pipeline parallelism), as pairs of rank and
    regions. If the ranks are `replicated`, all of them hold the same bytes, which are stored once. `uid` is the user of
    the engines. It is None in a hello, because the service gets it from the kernel.
    """

    slot_bytes: Annotated[tuple[Whole, ...], _Listed]
    regions: _Regions
    kv_cache_dtype: Text
    groups: Annotated[tuple[GroupIdentity, ...], _Listed]
    tensor_parallel: Whole = 1
    pipeline_parallel: Whole = 1
    prefill_context_parallel: Whole = 1
    decode_context_parallel: Whole = 1
    replicated: bool = False
    other_regions: Annotated[tuple[tuple[Whole, _Regions], ...], _Listed] = ()
    slot_format: Whole = SLOT_FORMAT
    uid: Whole | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.slot_bytes)

    @property
    def stored_slot_bytes(self) -> tuple[int, ...]:
        """The bytes of a slot in each extent of a row. There is one number for each rank, but only one if the ranks are
        replicated."""
        return self.slot_bytes[:1] if self.replicated else self.slot_bytes

    def canonical_value(self) -> dict[str, Any]:
        value = super().canonical_value()
        value["other_regions"] = [{"rank": rank, "regions": regions} for rank, regions in value["other_regions"]]
        return value


class NamespaceIdentity(Identity, frozen=True):
    """Identifies a meaning of keys.

    `weights_id` names the weights, and `weights_source` says where that name comes from (`snapshot`, `files`,
    `configured`). `value_settings` are the settings that change KV values (quantization, rope, scales). `hash_probe` is
    the result of this engine's hash function for known tokens. `epoch` changes when the weights of a running engine
    change. `unshared` is a sentence that says why no other engine may share these blocks, and is empty if others may.
    If it is set, no other engine has this `hash_probe`.
    """

    model: Text
    weights_id: Text
    weights_source: Text
    hash_probe: Text
    value_settings: Annotated[tuple[tuple[Text, Text], ...], _Listed] = ()
    epoch: Whole = 0
    unshared: str = ""

    def __post_init__(self) -> None:
        written = ((name, value if value.isprintable() else ascii(value)) for name, value in self.value_settings)
        force_setattr(self, "value_settings", tuple(sorted(written)))
        force_setattr(self, "unshared", plain(self.unshared))

    def canonical_value(self) -> dict[str, Any]:
        value = {**super().canonical_value(), "value_settings": dict(self.value_settings)}
        if not self.unshared:
            del value["unshared"]
        return value


class FleetWeights(Struct, frozen=True):
    """A name of an engine's weights, including the drafter's, that is valid on every node. If there is none,
    `weights_id` is empty, and `reason` is a sentence that says why. The name is no part of an identity, because a node
    identifies weights more strictly."""

    weights_id: Text = ""
    reason: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "reason", plain(self.reason))


UNNAMED_WEIGHTS: Final = FleetWeights()
"""The value for an engine that does not send one."""


def slug(text: str) -> str:
    """Write the last part of a model's name or path in lower-case letters, digits and hyphens. Returns `pool` if
    nothing is left of it."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_MAX_SLUG].strip("-") or "pool"


def difference(here: Identity, there: Identity) -> str | None:
    """Describe the differences between two identities of one kind by the names of the fields. None if they are
    equal."""
    found = list(_differences(here, there))
    return None if not found else "; ".join(found)


def _differences(here: Any, there: Any) -> Iterator[str]:
    for known in fields(here):
        mine, theirs = getattr(here, known.name), getattr(there, known.name)
        if mine == theirs:
            continue
        if known.name == "value_settings":
            yield _setting_difference(known.name, dict(mine), dict(theirs))
        elif isinstance(mine, tuple) and isinstance(theirs, tuple):
            yield _tuple_difference(known.name, mine, theirs)
        else:
            yield f"{known.name} is {_shown(mine)} here and {_shown(theirs)} there"


def _setting_difference(name: str, mine: dict[str, str], theirs: dict[str, str]) -> str:
    first = next(one for one in sorted({**mine, **theirs}) if mine.get(one) != theirs.get(one))
    values = [_shown(found[first]) if first in found else "not set" for found in (mine, theirs)]
    return f"{name}: {_shown(first)} is {values[0]} here and {values[1]} there"


def _tuple_difference(name: str, mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> str:
    """Describe the first entry that differs."""
    if len(mine) != len(theirs):
        return f"{name} has {len(mine)} entries here and {len(theirs)} there"
    at = next(number for number, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    one, other, name = mine[at], theirs[at], f"{name}[{at}]"
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _tuple_difference(name, one, other)
    if isinstance(one, RegionIdentity) and one.name == other.name:
        name = f"{name} ({one.name})"
    elif not isinstance(one, RegionIdentity | GroupIdentity):
        return f"{name} is {_shown(one)} here and {_shown(other)} there"
    return f"{name}: " + ", ".join(_differences(one, other))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
