"""Draws the README's pictures of a node service under traffic: `make pictures`, or `python -m docs.pictures`."""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL import Image
from tests.api.browser import Browser
from tests.helm.processes import KVSTOW, environ, running, until

from kvstow_api.client import Client, routes

_PORT = 9595
_SECONDS = 290.0  # the page shows the last five minutes
_WIDTH = 1440
_MEMORY_MIB, _CHUNK_MIB = 1536, 4
_POPULATED_PART = 0.7  # at the end
_REPLAYS = (
    ("--engines=2", "--ranks=2", "--slot-size=512KiB", "--rate=5", "--concurrency=3"),
    ("--engines=1", "--ranks=1", "--slot-size=256KiB", "--rate=3", "--concurrency=2"),
)
"""Each has a pool of its own, as the layouts differ. The pictures show the first one."""


def draw(folder: Path, seconds: float = _SECONDS, port: int = _PORT) -> None:
    """Run a node service with two pools and three engines for `seconds`, in which it populates most of its memory, and
    write its pictures into `folder`."""
    pause = seconds / (_POPULATED_PART * _MEMORY_MIB / _CHUNK_MIB)
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
        _operate(kvstow, pool)
        until(lambda: len(kvstow.call(routes.list_pools).items) == len(_REPLAYS), "the second pool")
        time.sleep(seconds)
        picture = ("top", f"--server={url}", f"--pool={pool}", f"--svg={folder / 'top.svg'}")
        subprocess.run([*KVSTOW, *picture], env=environ(), check=True)
        with Browser(Path(scratch) / "profile") as browser:
            for scheme, name in (("light", "status.png"), ("dark", "status-dark.png")):
                _photograph(browser, f"{url}/?pool={pool}", scheme, folder / name)


def _pool_with_blocks(kvstow: Client) -> str | None:
    return next((pool.name for pool in kvstow.call(routes.list_pools).items if pool.slots.cached >= 40), None)


def _operate(kvstow: Client, pool: str) -> None:
    """Changes that an operator might make, so that there are events."""
    kvstow.call(routes.evict, {"slots": 10}, pool=pool)


def _photograph(browser: Browser, url: str, scheme: str, path: Path) -> None:
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(url)
    browser.until("document.getElementById('live')?.textContent === 'live'")
    browser.screenshot(path, width=_WIDTH, height=800)
    browser.screenshot(path, width=_WIDTH, height=browser.evaluate("document.documentElement.scrollHeight"))
    Image.open(path).quantize().save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    draw(Path(__file__).parent)
