"""The options of `kvstow replay`: which contradict each other, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvstow.errors import ConfigError, SettingError
from kvstow_service.replay.shapes import Shape, even_shape, shape_named

if TYPE_CHECKING:
    from kvstow.control.tiersettings import TierSettings
    from kvstow.tier.writepolicy import WriteMode

_SLOT_SIZE = "256KiB"
_PATIENCE = 60.0  # seconds


def check_attach(attach: str | None, engines: int | None, policy: str | None, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --attach, or need it."""
    if attach is None:
        if engines is not None:
            raise SettingError("--engines", engines, "needs --attach: without it there is one engine, in this process")
        return
    if policy is not None:
        raise SettingError(
            "--policy", policy, "cannot be used with --attach: the pool is the service's; see kvstow config"
        )
    if no_data:
        raise SettingError("--no-data", True, "cannot be used with --attach: attached ranks move bytes")


def check_nodes(
    nodes: int, routing: str | None, concurrency: int, rate: float | None, time_scale: float | None
) -> None:
    """Raises `SettingError` for options that contradict --nodes, or need it."""
    if nodes == 1:
        if routing is not None:
            raise SettingError("--routing", routing, "needs --nodes")
        return
    for option, value in (("--rate", rate), ("--time-scale", time_scale)):
        if value is not None:
            raise SettingError(option, value, "cannot be used with --nodes: one request is served at a time")
    if concurrency > 1:
        raise SettingError("--concurrency", concurrency, "cannot be used with --nodes: one request is served at a time")


def check_port(port: int | None, nodes: int, attach: str | None, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --port."""
    if port is None:
        return
    if attach is not None:
        raise SettingError("--port", port, "cannot be used with --attach: the node service has an admin server")
    if nodes > 1:
        raise SettingError("--port", port, "cannot be used with --nodes: it is for one pool")
    if no_data:
        raise SettingError("--port", port, "cannot be used with --no-data")


def check_tier(tier: str | None, write: str | None, nodes: int, attach: str | None, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --tier or --nodes, or need --tier."""
    if tier is None and write is not None:
        raise SettingError("--tier-write", write, "needs --tier")
    option, value = ("--tier", tier) if tier is not None else ("--nodes", nodes if nodes > 1 else None)
    if value is None:
        return
    if attach is not None:
        raise SettingError("--attach", attach, f"cannot be used with {option}: the pool is the service's")
    if no_data:
        raise SettingError("--no-data", True, f"cannot be used with {option}: ranks move bytes")


def tier_settings(write: str | None, prefill_rate: float | None) -> TierSettings:
    """Without a prefill rate every fetch pays and is waited for, so that hit ratios do not depend on the machine."""
    from kvstow.control.tiersettings import TierSettings

    mode = cast("WriteMode", write or "through")
    if prefill_rate is None:
        return TierSettings(write=mode, deadline=_PATIENCE, lookup_wait=_PATIENCE)
    return TierSettings(write=mode, prefill_rate=prefill_rate)


def attach_path(attach: str) -> Path:
    from kvstow.attach.connection import socket_path

    try:
        return socket_path(attach)
    except ConfigError as error:
        raise error.renamed("--attach") from None


def shape_of(name: str | None, slot_size: str | None) -> Shape:
    from kvstow.bytesize import parse_size

    if name is not None and slot_size is not None:
        raise ConfigError("--slot-size", slot_size, "--slot-size or --shape, not both")
    return shape_named(name) if name else even_shape(parse_size(slot_size or _SLOT_SIZE, "--slot-size"))
