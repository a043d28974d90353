"""Draws the status page and `kvstow top` of a large node: `python -m docs.fleetpictures FOLDER`.

Six pools with five engines each, which say what this file has them say: no memory is used. Some of them are in
trouble, so that the pictures show a degraded node.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from PIL import Image
from tests.api import fakenode
from tests.api.browser import Browser
from tests.api.conftest import running
from tests.doubles.fakes import FakeClock
from tests.helm.processes import KVSTOW, environ

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import Completion
from kvstow.prefill import PrefillCost, PrefillNews
from kvstow.status import MemoryStatus, SessionStatus
from kvstow_api import app as applications
from kvstow_api import sampler as sampling

_MODELS = (
    "llama-3-3-70b-instruct-0a1b2c",
    "qwen3-32b-3d4e5f",
    "deepseek-r1-distill-qwen-32b-instruct-awq-6a7b8c",
    "mistral-small-24b-9d0e1f",
    "gemma-3-27b-it-2a3b4c",
    "gpt-oss-20b-5d6e7f",
)
_ENGINES = 5
_SLOT_BYTES, _SLOTS = 2 << 20, 4096
_SECONDS = 300  # the page shows the last five minutes
_GIB = 1 << 30
_PICTURES = (
    ("fleet.png", "light", 1440),
    ("fleet-dark.png", "dark", 1440),
    ("fleet-narrow.png", "dark", 390),
)


class _Node(fakenode.FakeNode):
    def sessions(self) -> list[SessionStatus]:
        return [
            replace(one, engine=f"{one.pool.rpartition('-')[0]}-{number}", host=f"vllm-{one.pool[:12]}-{number:05x}-x4")
            for number, one in enumerate(super().sessions())
        ]


def draw(folder: Path) -> None:
    fakenode.SLOT_BYTES, fakenode.SLOTS = _SLOT_BYTES, _SLOTS
    clock, chance = FakeClock(), random.Random(53)
    memory = MemoryStatus(
        512 * _GIB, 400 * _GIB, granted_bytes=96 * _GIB, used_bytes=60 * _GIB, populate_bytes_per_second=6.0 * _GIB
    )
    node = _Node(clock, memory_status=memory, granted_bytes=2 * _SLOTS * _SLOT_BYTES)
    engines = [node.attach(model) for model in _MODELS for _ in range(_ENGINES)]
    apps: list[Any] = []
    genuine = applications.create_app

    def kept(host: Any) -> Any:
        apps.append(genuine(host))
        return apps[-1]

    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=1))
    with patch("tests.api.conftest.create_app", kept), running(engine, directory=node) as listeners:
        sampler, began = apps[0].state.kvstow.sampler, time.monotonic() - _SECONDS
        for second in range(_SECONDS):
            clock.advance(1.0)
            for number, one in enumerate(engines):
                _work(one, number, second, chance)
            with patch.object(sampling, "time", SimpleNamespace(monotonic=lambda now=began + second: now)):
                sampler.tick()
        engines[7].control.lose("its connection has ended")
        engines[12].report_rank(1, state="degraded", error="the next chunk does not fit: 64 MiB are left")
        engines[16].begin_store([b"stuck"])
        clock.advance(200.0)
        for number, one in enumerate(engines):
            if number != 7:
                one.report_rank(0)
                one.report_rank(1) if number != 12 else None
        top = subprocess.run(
            [*KVSTOW, "top", f"--server={listeners.url}"],
            env=environ(COLUMNS="100"),
            check=True,
            capture_output=True,
            text=True,
        )
        (folder / "fleet-top.txt").write_text(top.stdout)
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
            Browser(Path(scratch) / "profile") as browser,
        ):
            for name, scheme, width in _PICTURES:
                photograph(browser, listeners.url, scheme, width, folder / name)


def _work(one: fakenode.Engine, number: int, second: int, chance: random.Random) -> None:
    """A request, every few seconds: look up some blocks, load those that are there, and store the others."""
    if chance.random() < 0.6:
        return
    length, topic = 4 + number % 9, chance.randrange(1, 200)
    keys = [b"%d-%d-%d" % (number % _ENGINES, topic, block) for block in range(length)]
    lease = one.control.acquire(keys)
    hits = len(lease.slots)
    if hits:
        op = one.control.begin_load(lease, range(hits))
        for rank in range(fakenode.RANKS):
            done = Completion(op.op_id, "done", num_bytes=hits * _SLOT_BYTES, seconds=0.001)
            one.control.complete(rank, f"{one.session_id}-{rank}", [done])
        one.control.note_prefill(PrefillNews(PrefillCost(2e-5), hit_tokens=16 * hits, hit_seconds=16 * hits * 2e-5))
    else:
        one.control.release_lease(lease)
    if hits < length:
        one.store(keys[hits:])


def photograph(browser: Browser, url: str, scheme: str, width: int, path: Path) -> None:
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(url)
    browser.until("document.getElementById('live')?.textContent === 'live'")
    browser.screenshot(path, width=width, height=900)
    browser.screenshot(path, width=width, height=browser.evaluate("document.documentElement.scrollHeight"))
    Image.open(path).quantize().save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
