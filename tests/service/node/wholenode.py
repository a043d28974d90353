"""A whole node in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstow.memory.limits import MemoryLimits
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings

EXTENT = 2 << 20


def ample_memory(folder: Path) -> MemoryLimits:
    """The limits of a machine that has memory for every test."""
    folder.mkdir(exist_ok=True)
    (folder / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    return MemoryLimits(folder / "meminfo", folder / "cgroup", folder / "fs")


def whole_node(folder: Path, *, extents: int = 8, socket: str = "attach", **options: Any) -> Node:
    """A node that was not started yet. `options`: settings, and arguments of `Node`."""
    given = {name: options.pop(name) for name in ("store", "clock", "on_failure") if name in options}
    settings = Settings(
        memory=extents * EXTENT,
        attach_socket=folder / "node" / f"{socket}.sock",
        extent_size=EXTENT,
        **{"pin_pause": 0, **options},
    )
    return Node(settings, limits=ample_memory(folder), **given)
