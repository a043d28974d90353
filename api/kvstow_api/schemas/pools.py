"""Pools, and what can be done with them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kvstow_api.schemas.base import Body, Count, KeyList, OnlyTrue, PositiveSeconds, Seconds, require_one


class RuntimePatch(Body):
    """New values of settings that can change while the engine runs; what is left out, or null, stays."""

    capacity_slots: Count | None = Field(None, examples=[2048])
    policy: Literal["lru", "arc"] | None = None
    pinning_paused: bool | None = Field(None, description="While true, ranks pin nothing more")


class PoolPatch(RuntimePatch):
    """New settings of a pool; what is left out stays. Bytes are of one rank, taken down to whole slots."""

    capacity_bytes: Count | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.capacity_slots is not None or self.capacity_bytes is not None:
            require_one(self, "capacity_slots", "capacity_bytes")
        elif self.policy is None and self.pinning_paused is None:
            allowed = "capacity_slots, capacity_bytes, policy, pinning_paused"
            raise PydanticCustomError("nothing_given", "at least one of {allowed} is needed", {"allowed": allowed})
        return self


class EvictBody(Body):
    """Exactly one of `slots`, `bytes` and `idle_seconds`. The coldest blocks go first."""

    slots: Count | None = Field(None, examples=[100])
    num_bytes: Count | None = Field(None, alias="bytes")
    idle_seconds: Seconds | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _has_one_selector(self) -> Self:
        require_one(self, "slots", "num_bytes", "idle_seconds")
        return self


class PurgeBody(Body):
    """Exactly one selector. `all`, `keys` and `key_prefixes` take protected and leased blocks, too; the others
    only what eviction may take."""

    everything: OnlyTrue | None = Field(None, alias="all", examples=[True])
    keys: KeyList | None = None
    key_prefixes: KeyList | None = None
    idle_seconds: Seconds | None = None
    age_seconds: Seconds | None = None
    slots: Count | None = None
    num_bytes: Count | None = Field(None, alias="bytes")
    dry_run: bool = False

    @model_validator(mode="after")
    def _has_one_selector(self) -> Self:
        selectors = ("everything", "keys", "key_prefixes", "idle_seconds", "age_seconds", "slots", "num_bytes")
        require_one(self, *selectors)
        return self


class ProtectBody(Body):
    """Keep these blocks from eviction for `ttl_seconds`, or (null) until they are unprotected."""

    keys: KeyList
    ttl_seconds: PositiveSeconds | None = Field(None, examples=[600.0])


class UnprotectBody(Body):
    """Exactly one of `keys` and `all`."""

    keys: KeyList | None = None
    everything: OnlyTrue | None = Field(None, alias="all")

    @model_validator(mode="after")
    def _has_one_selector(self) -> Self:
        require_one(self, "keys", "everything")
        return self
