"""The request bodies of the API. Within /v1 fields are only ever added."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvstow.config import POLICIES, parse_policy
from kvstow.control.recording import MOST_BYTES, MOST_SECONDS
from kvstow.errors import ConfigError, InvalidRequestError
from kvstow.hints import CONTEXT_BYTES, LONGEST_PAUSE
from kvstow.keys import BlockKey, parse_key
from kvstow.status import DrainMode

_MAX_LOOKUP_KEYS = 4096


class Body(BaseModel):
    """A body. Unknown fields, conversions of types, NaN and infinity are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


# -- types of fields -----------------------------------------------------------------------------------------------


def _require_true(value: bool) -> bool:
    if not value:
        raise PydanticCustomError("only_true", "this must be {allowed}, or left out", {"allowed": "true"})
    return value


def _to_key(given: object) -> BlockKey:
    try:
        return parse_key(given if isinstance(given, str) else "")
    except InvalidRequestError:
        allowed = "hex digits, two for each byte, in quotes"
        raise PydanticCustomError("key", "this is not a key; allowed: {allowed}", {"allowed": allowed}) from None


_KEY_SCHEMA = {
    "type": "string",
    "pattern": "^([0-9a-fA-F]{2})+$",
    "description": "A key, or its beginning, as hex",
    "examples": ["00017f3a"],
}


def _to_context(given: object) -> bytes:
    try:
        context = bytes.fromhex(given if isinstance(given, str) else "")
    except ValueError:
        context = b""
    if len(context) != CONTEXT_BYTES:
        allowed = f"{2 * CONTEXT_BYTES} hex digits, in quotes"
        raise PydanticCustomError(
            "context", "this is not the id of a context; allowed: {allowed}", {"allowed": allowed}
        )
    return context


_CONTEXT_SCHEMA = {
    "type": "string",
    "pattern": f"^[0-9a-fA-F]{{{2 * CONTEXT_BYTES}}}$",
    "description": "The id of a context, as hex",
    "examples": ["2f0c6a1d9be84b7f6d1e5a3c8b907f42"],
}

OnlyTrue = Annotated[bool, AfterValidator(_require_true), Field(json_schema_extra={"const": True})]
"""The value `true`. `Literal[True]` would accept 1 as well."""
Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, lt=1 << 63)]
Key = Annotated[bytes, PlainValidator(_to_key), WithJsonSchema(_KEY_SCHEMA)]
"""A `BlockKey`, given as hex."""
ContextId = Annotated[bytes, PlainValidator(_to_context), WithJsonSchema(_CONTEXT_SCHEMA)]
"""The id of a context, given as hex."""
KeyList = Annotated[list[Key], Field(min_length=1, fail_fast=True)]
"""Keys. Only the first wrong one is reported, because a body of 1 MiB could have half a million of them."""


def _policy(value: Any) -> str:
    try:
        return parse_policy(value)
    except ConfigError as error:
        raise PydanticCustomError(
            "not_allowed", "this is not a policy; allowed: {allowed}", {"allowed": error.allowed}
        ) from error


Policy = Annotated[
    str,
    BeforeValidator(_policy),
    WithJsonSchema({"type": "string", "enum": list(POLICIES)}),
]


# -- pools and blocks ----------------------------------------------------------------------------------------------


class PoolPatch(Body):
    """New settings of a pool. Settings that are left out, or null, stay. Bytes are of one rank, and are rounded down to
    whole slots. While `pinning_paused` is true, ranks pin no more memory."""

    capacity_slots: Count | None = None
    capacity_bytes: Count | None = None
    policy: Policy | None = None
    pinning_paused: bool | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.capacity_slots is not None and self.capacity_bytes is not None:
            allowed = "capacity_slots, capacity_bytes"
            raise PydanticCustomError("two_given", "only one of {allowed} is possible", {"allowed": allowed})
        if not self.model_dump(exclude={"dry_run"}, exclude_none=True):
            allowed = "capacity_slots, capacity_bytes, policy, pinning_paused"
            raise PydanticCustomError("nothing_given", "at least one of {allowed} is needed", {"allowed": allowed})
        return self


class EvictBody(Body):
    """Exactly one of `slots`, `bytes`, `idle_seconds` and `context`. The coldest blocks are evicted first."""

    slots: Count | None = None
    num_bytes: Count | None = Field(None, alias="bytes")
    idle_seconds: Seconds | None = None
    context: ContextId | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _has_one_selector(self) -> Self:
        given = self.model_dump(exclude={"dry_run"}, exclude_none=True, by_alias=True)
        if len(given) != 1:
            names = [field.alias or name for name, field in type(self).model_fields.items() if name != "dry_run"]
            words = {"allowed": ", ".join(names), "given": ", ".join(given) or "none"}
            raise PydanticCustomError("exactly_one", "exactly one of {allowed} is needed, got {given}", words)
        return self


class PurgeBody(EvictBody):
    """Exactly one selector. `all`, `keys`, `key_prefixes` and `context` remove leased blocks, too. The others remove
    only blocks that eviction may remove."""

    everything: OnlyTrue | None = Field(None, alias="all")
    keys: KeyList | None = None
    key_prefixes: KeyList | None = None
    age_seconds: Seconds | None = None


class ContextPatch(Body):
    """In how many seconds the next request of a context is expected."""

    resume_in_seconds: Annotated[float, Field(ge=0, le=LONGEST_PAUSE)]


class RecordBody(Body):
    """Limits of a recording: its seconds, and the bytes of its trace."""

    seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 600.0
    max_bytes: Annotated[int, Field(ge=1, le=MOST_BYTES)] = 64 << 20


class LookupBody(Body):
    """Keys of consecutive blocks, the root first."""

    keys: Annotated[list[Key], Field(min_length=1, max_length=_MAX_LOOKUP_KEYS, fail_fast=True)]


# -- drain, bypass, log --------------------------------------------------------------------------------------------


class DrainBody(Body):
    """What to drain. `stop_stores` accepts no new stores. `all` also answers lookups with misses. `deadline_seconds` is
    only shown to clients that wait. Transfers in flight are not interrupted when it has passed."""

    mode: DrainMode = "all"
    deadline_seconds: Seconds | None = None


class BypassBody(Body):
    """Which directions are switched off, for `ttl_seconds` or, if that is null, until they are switched on again."""

    load: bool | None = None
    store: bool | None = None
    ttl_seconds: PositiveSeconds | None = None

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        if self.load is None and self.store is None:
            raise PydanticCustomError(
                "nothing_given", "at least one of {allowed} is needed", {"allowed": "load, store"}
            )
        return self


class LogLevelBody(Body):
    """A level for one logger of KVStow and the loggers below it, until it is set again."""

    logger: Annotated[str, Field(max_length=100)] = "kvstow"
    level: Literal["debug", "info", "warning", "error"]
