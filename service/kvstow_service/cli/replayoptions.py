"""The options of `kvstow replay`: which contradict each other, and what they mean."""

from __future__ import annotations

from pathlib import Path

from kvstow.errors import ConfigError, SettingError
from kvstow_service.replay.trace import Shape, even_shape, shape_named

_SLOT_SIZE = "256KiB"


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


def check_port(port: int | None, attach: str | None, *, no_data: bool) -> None:
    """Raises `SettingError` for options that contradict --port."""
    if port is None:
        return
    if attach is not None:
        raise SettingError("--port", port, "cannot be used with --attach: the node service has an admin server")
    if no_data:
        raise SettingError("--port", port, "cannot be used with --no-data")


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
