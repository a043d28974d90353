"""What an operator has switched off: drain, bypass and paused pinning, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstow.status import BypassStatus, DrainStatus
from kvstow_api.numberformat import counted, duration


class Switch(NamedTuple):
    """Something that an operator has switched off; `undo` is the command that switches it on again."""

    words: str
    undo: str


def switches(
    drain: DrainStatus,
    bypass: BypassStatus,
    paused: Sequence[str] = (),
    *,
    several: bool = False,
) -> Iterator[Switch]:
    """`paused`: the pools that pin nothing for now. `several`: a command has to name the pool."""
    if drain.active:
        yield Switch(drain_words(drain), "kvstow undrain")
    if bypass.load or bypass.store:
        yield Switch(bypass_words(bypass), "kvstow bypass --off")
    for pool in paused:
        of_pool, flag = (f" in pool {pool}", f" --pool {pool}") if several else ("", "")
        yield Switch(f"pinning is paused{of_pool}", f"kvstow pinning resume{flag}")


def bypassed(bypass: BypassStatus) -> list[str]:
    """The directions that are switched off."""
    return [name for name, is_off in (("loads", bypass.load), ("stores", bypass.store)) if is_off]


def bypass_words(bypass: BypassStatus) -> str:
    off, left = bypassed(bypass), bypass.ttl_seconds_left
    if not off:
        return "nothing is bypassed"
    return f"{' and '.join(off)} are bypassed" + ("" if left is None else f" for another {duration(left)}")


def drain_words(drain: DrainStatus) -> str:
    if not drain.active:
        return "the server is not draining"
    if drain.drained:
        return "drained: nothing is in flight"
    stays = " (loads continue)" if drain.mode == "stop_stores" else ""
    words = f"draining{stays}: {counted(drain.pending_transfers, 'transfer')} and {counted(drain.leases, 'lease')} left"
    left = drain.deadline_seconds_left
    return words if left is None else f"{words}, {duration(left)} until the deadline"
