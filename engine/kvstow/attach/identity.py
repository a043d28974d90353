"""Who may share what: the identity of a pool's memory, and of the meaning of its keys.

Engines with equal pool identities share memory. Those that also have equal namespace identities share blocks. Whatever
changes the meaning of a slot's bytes belongs in one of the two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

from kvstow.attach.payloads import JsonObject

SLOT_FORMAT = 1
"""How KVStow places pages in a slot (`KVLayout.offsets`)."""
DRAFTER_WEIGHTS: Final = "drafter_weights"
"""The setting of `NamespaceIdentity.value_settings` that names a drafter's weights on this node."""
_NAME_DIGITS = 6
_MAX_SLUG = 40


class Identity:
    """A frozen dataclass of plain values. Two are equal if their digests are."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # both kinds are dataclasses

    @cached_property
    def canonical(self) -> bytes:
        """The same bytes for equal identities, in every version of Python: JSON with sorted names, ASCII only."""
        value = {"identity": type(self).__name__, **self.to_json()}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical).digest()

    def name(self, model: str) -> str:
        """`model` as a slug and six hex digits of the digest: `llama-3-1-8b-instruct-0a1b2c`."""
        return f"{slug(model)}-{self.digest.hex()[:_NAME_DIGITS]}"


@dataclass(frozen=True)
class RegionIdentity:
    """The pages of one region (layer) in a slot. `layout`: how a page's bytes are arranged (shape, order)."""

    name: str
    page_bytes: int
    layout: str = ""


@dataclass(frozen=True)
class GroupIdentity:
    """A KV group: what its blocks hold, how many tokens are in a block, how many tokens a hash covers, and its window
    if it has one."""

    kind: str
    block_tokens: int
    hash_tokens: int
    window: int | None = None


@dataclass(frozen=True)
class PoolIdentity(Identity):
    """One memory layout and one owner.

    `regions` are those of rank 0, in the order in which they lie in a slot. `other_regions` are those of the ranks that
    differ from rank 0 (pipeline parallelism), as (rank, regions). `slot_bytes` is indexed by rank. `replicated`: all
    ranks hold the same bytes, which are stored once. `uid` is the user of the engines, which the service knows from the
    kernel; None in a hello.
    """

    slot_bytes: tuple[int, ...]
    regions: tuple[RegionIdentity, ...]
    kv_cache_dtype: str
    groups: tuple[GroupIdentity, ...]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefill_context_parallel: int = 1
    decode_context_parallel: int = 1
    replicated: bool = False
    other_regions: tuple[tuple[int, tuple[RegionIdentity, ...]], ...] = ()
    slot_format: int = SLOT_FORMAT
    uid: int | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.slot_bytes)

    @property
    def stored_slot_bytes(self) -> tuple[int, ...]:
        """How many bytes a slot takes in each extent of a row: one number for each rank, or one for all if all have the
        same bytes."""
        return self.slot_bytes[:1] if self.replicated else self.slot_bytes

    def to_json(self) -> dict[str, Any]:
        value = super().to_json()
        value["other_regions"] = [{"rank": rank, "regions": regions} for rank, regions in value["other_regions"]]
        return value

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Raises `InvalidRequestError`, which names the field."""
        return cls(
            slot_bytes=value.wholes("slot_bytes"),
            regions=_regions(value),
            kv_cache_dtype=value.text("kv_cache_dtype"),
            groups=tuple(
                GroupIdentity(
                    group.text("kind"),
                    group.whole("block_tokens"),
                    group.whole("hash_tokens"),
                    group.optional_whole("window"),
                )
                for group in value.children("groups")
            ),
            tensor_parallel=value.whole("tensor_parallel", 1),
            pipeline_parallel=value.whole("pipeline_parallel", 1),
            prefill_context_parallel=value.whole("prefill_context_parallel", 1),
            decode_context_parallel=value.whole("decode_context_parallel", 1),
            replicated=value.flag("replicated", False),
            other_regions=tuple((other.whole("rank"), _regions(other)) for other in value.children("other_regions")),
            slot_format=value.whole("slot_format"),
            uid=value.optional_whole("uid"),
        )


@dataclass(frozen=True)
class NamespaceIdentity(Identity):
    """One meaning of keys.

    `weights_id` names the weights, and `weights_source` says where that name comes from (`snapshot`, `files`,
    `configured`). `value_settings` are settings that change values (quantization, rope, scales). `hash_probe` is the
    result of this engine's hash function for known tokens. `epoch` grows when the weights of a running engine change.
    `unshared` is the reason, as a sentence, why no other engine may share these blocks; empty if others may. If it is
    set, `hash_probe` is one that no other engine has.
    """

    model: str
    weights_id: str
    weights_source: str
    hash_probe: str
    value_settings: tuple[tuple[str, str], ...] = ()
    epoch: int = 0
    unshared: str = ""

    def __post_init__(self) -> None:
        written = ((name, value if value.isprintable() else ascii(value)) for name, value in self.value_settings)
        object.__setattr__(self, "value_settings", tuple(sorted(written)))

    def to_json(self) -> dict[str, Any]:
        # Not `asdict`, which copies each of thousands of settings.
        value = {one.name: getattr(self, one.name) for one in fields(self)}
        value["value_settings"] = dict(self.value_settings)
        if not self.unshared:
            del value["unshared"]
        return value

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Raises `InvalidRequestError`, which names the field."""
        return cls(
            model=value.text("model"),
            weights_id=value.text("weights_id"),
            weights_source=value.text("weights_source"),
            hash_probe=value.text("hash_probe"),
            value_settings=value.text_pairs("value_settings"),
            epoch=value.whole("epoch", 0),
            unshared=value.sentence("unshared"),
        )


class FleetWeights(NamedTuple):
    """The name of an engine's weights, including the drafter's, that is valid on every node. If there is none,
    `weights_id` is empty and the reason is a sentence. It is not part of an identity, because a node identifies its own
    weights more strictly."""

    weights_id: str = ""
    reason: str = ""

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Raises `InvalidRequestError`, which names the field."""
        return cls(value.text("weights_id", ""), value.sentence("reason"))


UNNAMED_WEIGHTS: Final = FleetWeights()
"""The value for an engine that does not send one."""


def slug(text: str) -> str:
    """The last part of a model's name or path in lower-case letters, digits and hyphens; `pool` if nothing is left."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_MAX_SLUG].strip("-") or "pool"


def difference(here: Identity, there: Identity) -> str | None:
    """The differences between two identities of one kind, as a sentence that names the fields. None if they are
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
    """The first entry that differs, and what differs in it."""
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
    return text if len(text) <= 160 else f"{text[:160]}..."


def _regions(value: JsonObject) -> tuple[RegionIdentity, ...]:
    return tuple(
        RegionIdentity(region.text("name"), region.whole("page_bytes"), region.text("layout", ""))
        for region in value.children("regions")
    )
