"""A demo of half a minute: `python -m kvstow_service.demo`, or `make demo`.

Starts a real `kvstow serve` whose pool is pinned slowly enough to watch, replays a generated trace meanwhile, follows
it over HTTP and stops it with SIGTERM. The exit code is 0 only if some bytes were loaded, all of them were correct, and
the service exited cleanly.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvstow.bytesize import format_size
from kvstow_service.replay.generate import TraceShape, generate_trace
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.summary import print_rows, summary_rows

_RANKS = 2
_POOL = "512MiB"  # per rank; less than the trace's 800 MiB of distinct blocks, so that some are evicted
_SLOT = "512KiB"
_PIN = ("--pin-chunk", "16MiB", "--pin-pause", "200ms")  # 32 steps: about 7 s, where the default takes 0.3 s
_SHAPE = TraceShape(sessions=100, turns=5, shared_prompts=4)
_DEADLINE = 150.0
_POLL = 0.01


class DemoError(Exception):
    """The demo cannot continue."""


class Service:
    """A `kvstow serve` process that replays a trace and prints the result as a line of JSON."""

    def __init__(self, trace: Path, log: Path) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.started = time.monotonic()
        self._log = log
        flags = ["--ranks", str(_RANKS), "--pool-size", _POOL, "--slot-size", _SLOT, *_PIN, "--port", str(port)]
        flags += ["--replay", str(trace), "--log-format", "json"]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstow_service", "serve", *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="demo-reader", daemon=True)
        self._reader.start()

    @property
    def seconds(self) -> float:
        """Time since the process started."""
        return time.monotonic() - self.started

    def result(self) -> ReplayResult | None:
        """The result of the replay; None before its end."""
        return ReplayResult(**json.loads(self._lines[0])) if self._lines else None

    def check(self) -> None:
        """Raises `DemoError` if the process has ended or the demo takes too long."""
        if self._process.poll() is not None:
            raise DemoError(f"the service ended with exit code {self._process.returncode}:\n{self._log.read_text()}")
        if self.seconds > _DEADLINE:
            raise DemoError(f"no result after {_DEADLINE:.0f} s:\n{self._log.read_text()}")

    def stop(self) -> int:
        """Send SIGTERM and return the exit code. Kills a process that does not exit."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line)


class Moment(NamedTuple):
    """State of the service at one time. Bytes are summed over the ranks."""

    pinned: int
    target: int
    usable_slots: int
    cached_slots: int
    pending: int

    def __str__(self) -> str:
        return (
            f"{format_size(self.pinned)} of {format_size(self.target)} pinned, "
            f"{self.usable_slots:,} slots usable, {self.cached_slots:,} cached, {self.pending} pending"
        )


def main() -> int:
    """Exit code of the demo."""
    parser = argparse.ArgumentParser(prog="python -m kvstow_service.demo", description="Run KVStow's demo.")
    parser.add_argument("--svg", type=Path, help="also write the output to this SVG file")
    svg: Path | None = parser.parse_args().svg
    console = Console(record=True, force_terminal=True, width=100) if svg else Console()
    try:
        with tempfile.TemporaryDirectory(prefix="kvstow-demo-") as folder:
            ok = _run(Path(folder), console, live=console.is_terminal and svg is None)
    except (DemoError, httpx.HTTPError) as error:
        console.print(f"demo failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    if svg:
        console.save_svg(str(svg), title="make demo")
    return 0 if ok else 1


def _run(folder: Path, console: Console, *, live: bool) -> bool:
    trace = folder / "trace.jsonl"
    requests = generate_trace(_SHAPE)
    trace.write_text("".join(f"{request.to_line()}\n" for request in requests))
    _say(console, f"A trace of {len(requests)} requests in {_SHAPE.sessions} conversations; {_RANKS} ranks of {_POOL}.")
    service = Service(trace, folder / "service.log")
    try:
        with httpx.Client(base_url=service.url, timeout=5.0) as client:
            for probe in ("/livez", "/readyz"):
                _wait_for_probe(service, client, console, probe)
            with _live_line(console, live=live) as line:
                result = _follow(service, client, console, line)
            _say(console, f"The service, after the replay: {_look(client)}.")
    finally:
        exit_code = service.stop()
    print_rows([*summary_rows(result), ("exit code", str(exit_code))], console, title="Replay")
    return _verdict(result, exit_code, console)


def _wait_for_probe(service: Service, client: httpx.Client, console: Console, probe: str) -> None:
    while not _answers(client, probe):
        service.check()
        time.sleep(_POLL)
    milliseconds = service.seconds * 1000
    moment = _look(client)
    _say(
        console,
        f"{probe} is 200 after {milliseconds:,.0f} ms, with {format_size(moment.pinned)} of "
        f"{format_size(moment.target)} pinned.",
    )


def _answers(client: httpx.Client, probe: str) -> bool:
    try:
        return client.get(probe).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _follow(service: Service, client: httpx.Client, console: Console, line: Live | None) -> ReplayResult:
    """Show a live line until the replay has ended and the pool is pinned. The first slot and every quarter pinned
    print a line that stays."""
    _wait_for_slots(service, client, console)
    quarter = 0
    while True:
        service.check()
        moment = _look(client)
        if line is not None:
            line.update(Text(f"{service.seconds:5.1f} s  {moment}", no_wrap=True))
        if moment.pinned * 4 // moment.target > quarter:
            quarter = moment.pinned * 4 // moment.target
            _say(console, f"{service.seconds:5.1f} s  {moment}")
        result = service.result()
        if result is not None and moment.pinned >= moment.target:
            return result
        time.sleep(10 * _POLL)


def _wait_for_slots(service: Service, client: httpx.Client, console: Console) -> None:
    while not (moment := _look(client)).usable_slots:
        service.check()
        time.sleep(_POLL)
    milliseconds = service.seconds * 1000
    _say(console, f"The first {moment.usable_slots} slots are usable after {milliseconds:,.0f} ms; the replay begins.")


def _look(client: httpx.Client) -> Moment:
    readiness, pool, transfers = (_get(client, path) for path in ("/v1/readiness", "/v1/pools/host", "/v1/transfers"))
    return Moment(
        pinned=sum(rank["pinned_bytes"] for rank in readiness["ranks"]),
        target=readiness["capacity_slots"] * pool["slot_bytes"] * _RANKS,
        usable_slots=readiness["usable_slots"],
        cached_slots=pool["slots"]["cached"] + pool["slots"]["leased"],
        pending=transfers["pending"]["loads"] + transfers["pending"]["stores"],
    )


def _get(client: httpx.Client, path: str) -> Any:
    return client.get(path).raise_for_status().json()


def _verdict(result: ReplayResult, exit_code: int, console: Console) -> bool:
    verified = result.ok and 0 < result.loaded_bytes == result.verified_bytes
    if verified and exit_code == 0:
        console.print("Every loaded byte was correct, and the service exited cleanly.", style="green")
        return True
    console.print("Not every loaded byte was correct, or the service did not exit cleanly.", style="red")
    return False


@contextmanager
def _live_line(console: Console, *, live: bool) -> Iterator[Live | None]:
    if not live:
        yield None
        return
    with Live(console=console, transient=True) as line:
        yield line


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
