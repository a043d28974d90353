"""What the launcher of an attached replay and its engines say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvstow_service.replay.driver import Position
from kvstow_service.replay.pace import ReplayOptions
from kvstow_service.replay.result import Tally
from kvstow_service.replay.shapes import Shape
from kvstow_service.replay.trace import TraceRequest

ENGINE_MODULE = "kvstow_service.replay.engineprocess"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine's process needs: the first message to it. `is_held`: it attaches at once, and starts no request
    before the launcher says `Begin`."""

    name: str
    socket: Path
    shape: Shape
    num_ranks: int
    kv_blocks: int
    wanted_bytes: int
    requests: Sequence[TraceRequest]
    options: ReplayOptions
    is_held: bool = False


class Begin(NamedTuple):
    """Start with the first request. For an engine whose `EngineSpec` says `is_held`."""


class Finish(NamedTuple):
    """Start no request any more, and end when those in flight have."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this life of an engine is. `sessions`: how often it has attached; `problem`: why it is not attached now;
    `waits`: look-ups that the service has answered later, as one with a fleet tier does;
    `position` counts in the requests that it was given."""

    tally: Tally
    position: Position
    seconds: float
    slots: int
    sessions: int
    seconds_without: float
    problem: str | None
    waits: int
    is_last: bool = False
