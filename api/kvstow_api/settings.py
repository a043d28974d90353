"""Settings that change while the engine runs: what they are, what a change would do, and doing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from fastapi import Header, HTTPException
from starlette.concurrency import run_in_threadpool

from kvstow.errors import ConfigError, ConflictError
from kvstow_api.operations import Operation
from kvstow_api.schemas.pools import RuntimePatch
from kvstow_api.services import Services
from kvstow_api.views.config import RuntimeConfig
from kvstow_api.views.pools import PlanView

T = TypeVar("T")
IfMatch = Annotated[str | None, Header(description="An ETag: 412 if the settings have changed since it was given")]

_PLANNED = 1024  # blocks looked at per hold of the engine's lock


def current(use: Services) -> RuntimeConfig:
    desired = use.engine.desired()
    return RuntimeConfig.of(
        {
            "capacity_slots": desired.capacity_slots,
            "policy": use.engine.stats().policy,
            "pinning_paused": desired.paused,
        }
    )


def etag(use: Services) -> str:
    """Names the settings. It is never reused, not even when a change is reverted. Read it before the settings that it
    names, so that a change in between is noticed."""
    return f'"{use.engine.engine_id}-{use.engine.admin.settings_revision}"'


def _check_match(use: Services, if_match: str | None) -> None:
    """Raises 412 unless the client has seen the settings as they are, or does not care."""
    if if_match is not None and not {"*", etag(use)} & set(map(str.strip, if_match.split(","))):
        raise HTTPException(412, f"If-Match is {if_match[:100]}; the settings have changed, their ETag is {etag(use)}")


async def plan(use: Services, patch: RuntimePatch, if_match: str | None) -> PlanView:
    """What `apply` would do, or raise."""
    _check_match(use, if_match)
    return await run_in_threadpool(_plan, use, patch)


def _plan(use: Services, patch: RuntimePatch) -> PlanView:
    """Looks at every block above the new capacity, slice by slice."""
    _check(use, patch)
    now = current(use)
    slot: int | None = patch.capacity_slots
    evicted = 0
    while slot is not None:
        page = use.engine.blocks(slot, _PLANNED)
        if any(block.state == "protected" for block in page.blocks):
            raise ConflictError(f"protected blocks lie above slot {patch.capacity_slots}; unprotect them first")
        evicted += len(page.blocks)
        slot = page.next_slot
    return PlanView(
        capacity_slots=_new(patch.capacity_slots, now.capacity_slots),
        policy=_new(patch.policy, now.policy),
        pinning_paused=_new(patch.pinning_paused, now.pinning_paused),
        evicted_slots=evicted,
        evicted_bytes=evicted * use.engine.config.slot_bytes,
    )


async def apply(use: Services, patch: RuntimePatch, if_match: str | None) -> Operation | None:
    """Make the change, if `if_match` allows it; a new capacity goes on as an operation. One change at a time, so that
    of two with the same ETag the second is refused. Raises before anything has changed."""
    async with use.settings_lock:
        _check_match(use, if_match)
        _check(use, patch)
        operation = None
        capacity = patch.capacity_slots
        if capacity is not None:
            operation = use.operations.start("resize", lambda: use.engine.admin.resize(capacity))
        if patch.pinning_paused is not None:
            use.engine.admin.pause_pinning(patch.pinning_paused)
        if patch.policy is not None:  # takes as long as the pool is large: it is copied in order of eviction
            await run_in_threadpool(use.engine.admin.set_policy, patch.policy)
        return operation


def check_startup(use: Services, wanted: dict[str, object]) -> None:
    """Raises `ConfigError` for an unknown setting, and `ConflictError` for one that only a restart changes."""
    known = use.context.settings
    for name in wanted:
        if name not in known:
            raise ConfigError(f"startup.{name}", wanted[name], _one_of(sorted(known)))
    changed = [name for name in wanted if wanted[name] != known[name]]
    if changed:
        raise ConflictError(
            f"startup.{', startup.'.join(changed)} cannot change while the service runs: restart it with the new value"
            f" (what can change now: {_one_of(list(RuntimeConfig.__dataclass_fields__))}, under runtime)"
        )


def _check(use: Services, patch: RuntimePatch) -> None:
    highest = use.context.max_capacity_slots
    if patch.capacity_slots is not None and patch.capacity_slots > highest:
        raise ConfigError("capacity_slots", patch.capacity_slots, f"1 to {highest}, the maximum of this host")


def _one_of(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _new(given: T | None, now: T) -> T:
    return now if given is None else given
