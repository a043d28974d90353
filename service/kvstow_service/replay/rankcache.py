"""The KV cache of one rank, and what copies it to and from host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstow.devices.base import Device
from kvstow.layout import KVLayout
from kvstow.memory.pinning import Registrar
from kvstow.memory.slotpool import SlotPool
from kvstow_service.replay.kv import RankKV


@dataclass(frozen=True, slots=True)
class RankCache:
    """`registrar` registers the host memory that `make_device`, which is called once, copies to and from. `launches`:
    the device is also the `Launcher` of its data plane."""

    layout: KVLayout
    kv: RankKV
    registrar: Registrar
    make_device: Callable[[SlotPool], Device]
    numa_node: int | None = None
    launches: bool = False
