"""Draws the pictures of the status page and of `kvstow top`: `make pictures`, or `python -m docs.pictures`.

Two nodes are drawn: a real service with three engines under traffic, for the README, and a large node that is degraded,
for docs/api.md. The engines of the large node are only simulated, so it needs no memory.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from PIL import Image
from tests.api import fakenode
from tests.api.browser import Browser
from tests.api.conftest import running as serving
from tests.doubles.fakes import FakeClock
from tests.helm.processes import KVSTOW, environ, running, until

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import Completion
from kvstow.prefill import PrefillCost, PrefillNews
from kvstow.status import MemoryStatus, SessionStatus
from kvstow_api import app as applications
from kvstow_api import sampler as sampling
from kvstow_api.client import Client, routes
from kvstow_api.figures import NOW_SECONDS

_SECONDS = 300.0  # the page shows the last five minutes
_WIDE, _NARROW = 1440, 390
_GIB = 1 << 30


class _Picture(NamedTuple):
    name: str
    scheme: str
    width: int


def _photograph(url: str, folder: Path, *pictures: _Picture) -> None:
    """Write pictures of the whole status page."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        Browser(Path(scratch) / "profile") as browser,
    ):
        for name, scheme, width in pictures:
            path = folder / name
            browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.screenshot(path, width=width, height=900)  # sets the width, which the height depends on
            browser.open(url)
            browser.until("document.getElementById('live')?.textContent === 'live'")
            browser.screenshot(path, width=width, height=900)
            browser.screenshot(path, width=width, height=browser.evaluate("document.documentElement.scrollHeight"))
            Image.open(path).quantize().save(path, optimize=True)  # a third of the bytes


# -- a service under traffic -------------------------------------------------------------------------------------------


_MEMORY_MIB, _CHUNK_MIB = 1536, 4
_POPULATING_PART = 0.3
"""The part of the time in which the memory is populated. The rest is long enough for the curve of the pool."""
_REPLAYS = (
    ("--engines=2", "--ranks=2", "--slot-size=512KiB", "--rate=5", "--concurrency=3", "--prefill-rate=20000"),
    ("--engines=1", "--ranks=1", "--slot-size=256KiB", "--rate=3", "--concurrency=2"),
)
"""Each has a pool of its own, as the layouts differ. The pictures show the first one."""


def draw_service(folder: Path, seconds: float = _SECONDS, port: int = 9595) -> None:
    """Run a node service with two pools and three engines for `seconds`, and write its pictures
    into `folder`."""
    pause = seconds * _POPULATING_PART / (_MEMORY_MIB / _CHUNK_MIB)
    pace = (f"--pin-chunk={_CHUNK_MIB}MiB", f"--pin-pause={pause * 1000:.0f}ms")
    memory = (f"--memory={_MEMORY_MIB}MiB", "--extent-size=64MiB")
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        trace, attach = Path(scratch) / "trace.jsonl", Path(scratch) / "node" / "attach.sock"

        def start(name: str, *command: Any) -> None:
            stack.enter_context(running(*KVSTOW, *command, log=Path(scratch) / name, env=environ()))

        subprocess.run(
            [*KVSTOW, "trace", "generate", "--sessions=1000", f"--output={trace}"], env=environ(), check=True
        )
        admin = Path(scratch) / "admin" / "admin.sock"
        sockets = (f"--port={port}", f"--attach-socket={attach}", f"--admin-socket={admin}")
        start("serve", "serve", *memory, *pace, *sockets, "--shutdown-delay=0")
        kvstow = stack.enter_context(Client(f"unix:{admin}"))
        until(attach.is_socket, "the socket at which engines attach")
        first, second = _REPLAYS
        start("first", "replay", trace, f"--attach=unix:{attach}", *first)
        pool = until(lambda: _pool_with_blocks(kvstow), "the first blocks")
        start("second", "replay", trace, f"--attach=unix:{attach}", *second)
        kvstow.call(routes.evict, {"slots": 10}, pool=pool)  # so that there is an event of an operator
        until(lambda: len(kvstow.call(routes.list_pools).items) == len(_REPLAYS), "the second pool")
        time.sleep(seconds)
        picture = ("top", f"--server={url}", f"--pool={pool}", f"--svg={folder / 'top.svg'}")
        subprocess.run([*KVSTOW, *picture], env=environ(), check=True)
        pictures = _Picture("status.png", "light", _WIDE), _Picture("status-dark.png", "dark", _WIDE)
        _photograph(f"{url}/?pool={pool}", folder, *pictures)


def _pool_with_blocks(kvstow: Client) -> str | None:
    return next((pool.name for pool in kvstow.call(routes.list_pools).items if pool.slots.cached >= 40), None)


# -- a large node that is degraded -------------------------------------------------------------------------------------


_MODELS = (
    "llama-3-3-70b-instruct-0a1b2c",
    "qwen3-32b-3d4e5f",
    "deepseek-r1-distill-qwen-32b-instruct-awq-6a7b8c",
    "mistral-small-24b-9d0e1f",
    "gemma-3-27b-it-2a3b4c",
    "gpt-oss-20b-5d6e7f",
)
_ENGINES = 5
"""The number of engines of each pool."""
_SLOT_BYTES, _SLOTS = 2 << 20, 4096
_LOST, _SILENT, _HANGING = 7, 12, 16
"""The numbers of the engines that have trouble."""
_STEP_SECONDS = 0.25


class _Fleet(fakenode.FakeNode):
    """A node whose engines do some work in every step of its clock."""

    def __init__(self, clock: FakeClock) -> None:
        memory = MemoryStatus(
            512 * _GIB, 400 * _GIB, granted_bytes=96 * _GIB, used_bytes=60 * _GIB, populate_bytes_per_second=6.0 * _GIB
        )
        super().__init__(clock, memory_status=memory, granted_bytes=2 * _SLOTS * _SLOT_BYTES)
        self._working = [self.attach(model) for model in _MODELS for _ in range(_ENGINES)]
        self._chance = random.Random(53)
        self._moved = {one.session_id: [0, 0] for one in self._working}
        """The bytes that each rank of a session has loaded and stored."""

    def sessions(self) -> list[SessionStatus]:
        return [
            replace(one, engine=f"{one.pool.rpartition('-')[0]}-{number}", host=f"vllm-{one.pool[:12]}-{number:05x}-x4")
            for number, one in enumerate(super().sessions())
        ]

    def make_trouble(self) -> None:
        """Lose one engine, let a rank of another fall silent, and leave a store of a third unfinished."""
        self.engines[_LOST].control.lose("its connection has ended")
        self.engines[_HANGING].begin_store([b"stuck"])
        self._working = [one for number, one in enumerate(self.engines) if number not in (_LOST, _SILENT, _HANGING)]
        self.clock.advance(200.0)

    def work(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for pool in self.shared.values():
            pool.tick()
        for number, one in enumerate(self.engines):
            if one in self._working and self._chance.random() < 0.4 * seconds:
                self._request(one, number)
            loaded, stored = self._moved[one.session_id]
            for rank in range(fakenode.RANKS):
                if number != _LOST and (one in self._working or number != _SILENT or rank == 0):
                    one.report_rank(rank, load_bytes_total=loaded, store_bytes_total=stored)

    def _request(self, one: fakenode.Engine, number: int) -> None:
        """Look up some blocks, load those that are there, and store the others."""
        length, topic = 4 + number % 9, self._chance.randrange(1, 200)
        keys = [b"%d-%d-%d" % (number % _ENGINES, topic, block) for block in range(length)]
        lease = one.control.acquire(keys)
        hits, moved = len(lease.slots), self._moved[one.session_id]
        if hits:
            op = one.control.begin_load(lease, range(hits))
            for rank in range(fakenode.RANKS):
                done = Completion(op.op_id, "done", num_bytes=hits * _SLOT_BYTES, seconds=0.001)
                one.control.complete(rank, f"{one.session_id}-{rank}", [done])
            one.control.note_prefill(PrefillNews(PrefillCost(2e-5), hit_tokens=16 * hits, hit_seconds=16 * hits * 2e-5))
            moved[0] += hits * _SLOT_BYTES
        else:
            one.control.release_lease(lease)
        if hits < length:
            one.store(keys[hits:])
            moved[1] += (length - hits) * _SLOT_BYTES


def draw_fleet(folder: Path, seconds: float = _SECONDS) -> None:
    """Show six pools with five engines each, some of which have trouble, after `seconds` of traffic."""
    clock = FakeClock()
    with patch.multiple(fakenode, SLOT_BYTES=_SLOT_BYTES, SLOTS=_SLOTS):
        fleet = _Fleet(clock)
        apps: list[Any] = []
        genuine = applications.create_app

        def kept(host: Any) -> Any:
            apps.append(genuine(host))
            return apps[-1]

        engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=1))
        with patch("tests.api.conftest.create_app", kept), serving(engine, directory=fleet) as listeners:
            sampler, began = apps[0].state.kvstow.sampler, time.monotonic() - seconds
            for second in range(round(seconds)):
                fleet.work(1.0)
                with patch.object(sampling, "time", SimpleNamespace(monotonic=lambda now=began + second: now)):
                    sampler.tick()
            fleet.make_trouble()
            with _going_on(fleet):
                time.sleep(NOW_SECONDS)  # so that the figures of the last seconds have this traffic
                top = subprocess.run(
                    [*KVSTOW, "top", f"--server={listeners.url}"],
                    env=environ(COLUMNS="100"),
                    check=True,
                    capture_output=True,
                    text=True,
                )
                (folder / "fleet-top.txt").write_text(top.stdout)
                _photograph(
                    listeners.url,
                    folder,
                    _Picture("fleet.png", "light", _WIDE),
                    _Picture("fleet-dark.png", "dark", _WIDE),
                    _Picture("fleet-narrow.png", "dark", _NARROW),
                )


@contextmanager
def _going_on(fleet: _Fleet) -> Iterator[None]:
    """Let the engines work on a thread."""
    ended = Event()

    def work() -> None:
        while not ended.wait(_STEP_SECONDS):
            fleet.work(_STEP_SECONDS)

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    draw_fleet(Path(__file__).parent)
    draw_service(Path(__file__).parent)
