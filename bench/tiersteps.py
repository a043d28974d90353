"""What a scheduler's step costs with a tier, in a network namespace of its own: a step looks up a new request in the
pool, and with a tier it also asks a Mooncake of this machine, whose answer comes later. argv: seconds of each part.

Answers with a line of JSON: for each part, milliseconds of its steps.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from tests.service.tiers.mooncake.cluster import Cluster

from kvstow.config import EngineConfig
from kvstow.control.tiersettings import TierSettings
from kvstow.keys import make_key
from kvstow_service.replay.offload import EmbeddedOffload, Offload
from kvstow_service.replay.session import local_session
from kvstow_service.replay.shapes import even_shape
from kvstow_service.replay.tieredoffload import tiered_offload
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeStore
from kvstow_service.tiers.tierhost import TierChoice

_SLOT_BYTES = 64 << 10
_BLOCKS = 100
_BETWEEN_SECONDS = 0.01
_KILL_SECONDS = 2.0

_numbers = count()


def measure(seconds: float) -> dict[str, list[float]]:
    config = EngineConfig(slot_bytes=_SLOT_BYTES, capacity_slots=1000, block_tokens=512)
    stop = Event()
    with TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "log")
        try:
            with local_session(config, kv_blocks=16, stop=stop, shape=even_shape(_SLOT_BYTES), shared=True) as session:
                choice = TierChoice(cluster.url, MooncakeStore(cluster.location), "through")
                settings = TierSettings(write="through")
                with tiered_offload(session.engine, session.ranks, choice, settings, "bench", stop=stop) as offload:
                    _run(offload, seconds / 4)
                    return {
                        "without a tier": _run(EmbeddedOffload(session.engine), seconds),
                        "with look-ups": _run(offload, seconds),
                        "while its processes are killed": _run(offload, seconds, on_step=_Killer()),
                    }
        finally:
            cluster.close()


def _run(offload: Offload, seconds: float, *, on_step: Callable[[], object] = lambda: None) -> list[float]:
    found = []
    end = time.monotonic() + seconds
    gc.collect()
    while time.monotonic() < end:
        keys = [make_key(0, next(_numbers).to_bytes(32, "big")) for _ in range(_BLOCKS)]
        on_step()
        began = time.perf_counter()
        offload.find(keys)
        offload.step()
        found.append(1000 * (time.perf_counter() - began))
        time.sleep(_BETWEEN_SECONDS)
    return found


class _Killer:
    """Kills the processes of this one that run Mooncake's library, now and then."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _KILL_SECONDS
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text().split():
                if b"storechild" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]))), flush=True)
