"""`kvstow top` on a real terminal, against real servers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.service.cli.terminal import Terminal

from kvstow_api.client import Client
from kvstow_service.cli.board import board
from kvstow_service.cli.top import ask

KEYS = [bytes([0, 0, number]) for number in range(6)]
LEAVE_SCREEN = "\x1b[?1049l"


@pytest.mark.parametrize("key", ["q", "Q", "\x03"])
def test_top_shows_the_server_and_restores_the_terminal(host: Any, on_terminal: Any, key: str) -> None:
    host.store(*KEYS)
    with on_terminal("top") as terminal:
        for words in (
            "version 1.2.3",
            "all slots are pinned",
            "host, pid 1001, fake:1",
            "cached 6",
            "hit ratio",
            "loads 0",
            "evictions",
        ):
            terminal.until(words)
        terminal.type(key)
        terminal.until(LEAVE_SCREEN)
        assert terminal.end() == 0


def test_top_shows_changes(host: Any, on_terminal: Any) -> None:
    with on_terminal("top", "--interval", "100ms") as terminal:
        terminal.until("evictions")
        host.store(*KEYS)
        terminal.until("cached 6")
        host.engine.begin_store([b"\x09\x09"], [0], request_id="r-7")
        terminal.until("stores 1 (4 KiB)")
        terminal.until("request r-7")
        terminal.until("q or Ctrl-C: quit")
        host.engine.admin.drain("all", None)
        terminal.until("draining")
        terminal.type("q")
        assert terminal.end() == 0


def test_top_reconnects_when_the_server_is_back(make_host: Any, tmp_path: Path, child_environ: dict[str, str]) -> None:
    uds = tmp_path / "admin.sock"
    with Terminal("top", "--server", f"unix:{uds}", "--interval", "100ms", environ=child_environ) as terminal:
        terminal.until("no answer")
        first = make_host(uds=uds)
        terminal.until("all slots are pinned")
        first.stop()
        terminal.until("no answer")
        terminal.until("rank 1")  # what it said last stays
        make_host(uds=uds, version="9.8.7")
        terminal.until("version 9.8.7")
        terminal.type("q")
        assert terminal.end() == 0


def test_top_follows_the_size_of_the_terminal(on_terminal: Any) -> None:
    with on_terminal("top", "--interval", "100ms") as terminal:
        terminal.until("memory")
        wide = terminal.until("64 KiB").count("━")
        terminal.until("evictions")
        terminal.resize(rows=30, columns=80)
        bars = wide
        while not 0 < bars < wide:  # it may have begun another picture before
            terminal.until("memory")
            bars = terminal.until("64 KiB").count("━")
        terminal.type("q")
        assert terminal.end() == 0


def test_without_a_terminal_top_prints_once(kvstow: Any) -> None:
    outcome = kvstow("top", "--interval", "100ms")
    assert outcome.exit_code == 0
    assert "all slots are pinned" in outcome.stdout
    assert "q or Ctrl-C: quit" not in outcome.stdout
    assert "\x1b" not in outcome.stdout


def test_a_picture_is_written(kvstow: Any, tmp_path: Path) -> None:
    path = tmp_path / "top.svg"
    assert kvstow("top", "--interval", "100ms", "--svg", str(path)).exit_code == 0
    assert path.read_text().startswith("<svg")


def screen(host: Any, height: int) -> str:
    with Client(host.url) as client:
        shown = ask(client)
    console = Console(width=80, record=True)
    console.print(board(shown, None, width=80, height=height, server=host.url))
    return console.export_text()


def test_trouble_and_switches_are_shown_in_full(make_host: Any) -> None:
    host = make_host(settings={"model": "some/model"})
    host.ranks[1].state, host.ranks[1].error = "degraded", "the next chunk does not fit: " + "64 MiB are left " * 5
    host.ranks[1].report()
    host.engine.admin.set_bypass(load=True, store=False, ttl_seconds=None)
    host.engine.admin.pause_pinning(True)
    text = screen(host, 30)
    assert " ".join(text.split()).count("64 MiB are left") == 5
    assert f"kvstow {socket.gethostname()}: some/model, test, version 1.2.3" in text
    assert "rank 1        ━" in text
    assert "warning  loads are bypassed  `kvstow bypass --off`" in text
    assert "pinning is paused  `kvstow pinning resume`" in text


@pytest.mark.parametrize(("height", "is_airy"), [(24, False), (40, True)])
def test_everything_fits_on_a_small_screen(make_host: Any, height: int, is_airy: bool) -> None:
    host = make_host(num_ranks=8)
    for number in range(6):
        host.engine.begin_store([bytes([9, number])], [number], request_id=f"r-{number}")
    text = screen(host, height)
    assert len(text.splitlines()) <= height
    assert ("\n\nmemory" in text) == is_airy
    assert "evictions" in text
