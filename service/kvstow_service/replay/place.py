"""Where a rank's KV cache lies, how it is cut, and how its bytes travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvstow.config import COPY_STRATEGIES, CopyStrategy
from kvstow.errors import ConfigError
from kvstow_service.replay.shapes import DeviceName, Shape


@dataclass(frozen=True, slots=True)
class Place:
    """`shape` None: a few equal layers of the pool's slot size. Only CUDA knows more than one `copy_strategy`.

    Raises `ConfigError`, which names the flag.
    """

    device: DeviceName = "cpu"
    shape: Shape | None = None
    copy_strategy: CopyStrategy = "auto"

    def __post_init__(self) -> None:
        if self.device not in get_args(DeviceName):
            raise ConfigError("--device", self.device, " or ".join(get_args(DeviceName)))
        if self.copy_strategy not in COPY_STRATEGIES:
            raise ConfigError("--copy-strategy", self.copy_strategy, " or ".join(COPY_STRATEGIES))
        if self.device != "cuda" and self.copy_strategy != "auto":
            raise ConfigError("--copy-strategy", self.copy_strategy, f"auto, as {self.device} copies in one way only")


ON_CPU = Place()
