"""Draws the README's pictures of an engine under traffic: `make pictures`, or `python -m docs.pictures`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from tests.api.browser import Browser
from tests.helm.processes import KVSTOW, environ, running, until

from kvstow_api.client import ApiError, Client, calls

_PORT = 9595
_SECONDS = 290.0  # the page shows the last five minutes
_WIDTH = 1040
_RANKS, _POOL_MIB, _CHUNK_MIB = 4, 384, 2
_PINNED_PART = 0.7  # at the end
_TRAFFIC = ("--slot-size=256KiB", "--rate=12")


def draw(folder: Path, seconds: float = _SECONDS, port: int = _PORT) -> None:
    """Run an engine for `seconds`, in which it pins most of its pool, and write its pictures into `folder`."""
    pause = seconds / (_PINNED_PART * _POOL_MIB / _CHUNK_MIB)
    pool = (f"--ranks={_RANKS}", f"--pool-size={_POOL_MIB}MiB")
    pinning = (f"--pin-chunk={_CHUNK_MIB}MiB", f"--pin-pause={pause * 1000:.0f}ms")
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as scratch:
        trace, log = Path(scratch) / "trace.jsonl", Path(scratch) / "log"
        generate = ("trace", "generate", "--sessions=1000", f"--output={trace}")
        subprocess.run([*KVSTOW, *generate], env=environ(), check=True)
        engine = (sys.executable, "-m", "tests.embeddedhost", trace, *pool, *pinning, *_TRAFFIC, f"--port={port}")
        with running(*engine, log=log, env=environ()) as process, Client(url) as kvstow:
            until(lambda: process.poll() is not None or _has_blocks(kvstow), "the first blocks")
            assert process.poll() is None, log.read_text()
            _operate(kvstow)
            time.sleep(seconds)
            picture = ("top", f"--server={url}", f"--svg={folder / 'top.svg'}")
            subprocess.run([*KVSTOW, *picture], env=environ(), check=True)
            with Browser(Path(scratch) / "profile") as browser:
                for scheme, name in (("light", "status.png"), ("dark", "status-dark.png")):
                    _photograph(browser, url, scheme, folder / name)


def _has_blocks(kvstow: Client) -> bool:
    try:
        return len(kvstow.send(calls.blocks()).items) >= 40
    except ApiError:  # not started yet
        return False


def _operate(kvstow: Client) -> None:
    """Changes that an operator might make, so that there are events."""
    kvstow.send(calls.protect([block.key for block in kvstow.send(calls.blocks()).items[:20]]))
    kvstow.send(calls.evict(slots=10))


def _photograph(browser: Browser, url: str, scheme: str, path: Path) -> None:
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(url)
    browser.until("document.getElementById('live')?.textContent === 'live'")
    browser.screenshot(path, width=_WIDTH, height=800)
    browser.screenshot(path, width=_WIDTH, height=browser.evaluate("document.documentElement.scrollHeight"))
    Image.open(path).quantize().save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    draw(Path(__file__).parent)
