"""Lookups of attached engines, over the wire to a real `kvstow serve` and in process, the rate that several engines
reach together, and how soon a killed service has its index again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.admin import REQUESTS_PER_SECOND
from bench.attachclient import SLOT_BYTES
from bench.machine import wait_until_quiet
from bench.program import answer_of, running
from bench.report import Table, verdict

SLOTS = 200_000
MANY_SLOTS = 1_000_000
CLIENTS = (1, 2, 4, 8)
_RATE_SECONDS = 3.0
_PATIENCE_SECONDS = 8.0
_START_SECONDS = 30.0
_MIB = 1 << 20
_RATIO_BAR, _P99_BAR, _BUSY_BAR, _RATE_BAR, _OWN_BAR, _IDLE_BAR = 2.2, 300e-6, 1.5e-3, 10_000, 100e-6, 20e-6
_LIAR_BAR = 10e-3
_INDEX_BAR, _LIVE_BAR, _BASE_BYTES, _SLOT_BYTES = 5.0, 1.0, 120 * _MIB, 320

Times = dict[str, list[float]]


def run(repeats: int, say: Callable[[str], None]) -> list[Table]:
    runs: dict[str, list[tuple[Times, Times]]] = {"fresh": [], "worn": []}
    for turn in range(repeats):
        for pool, found in runs.items():
            busy = wait_until_quiet(_PATIENCE_SECONDS)
            say(f"attach, {pool} pool, run {turn + 1} of {repeats}, CPUs {busy:.0%} busy")
            inside: Times = _answer("bench.attachbaseline", str(SLOTS), pool)
            with _filled_service(SLOTS, pool) as service:
                found.append((inside, service.client("latency")))
    with _filled_service(SLOTS, "worn") as service:
        say("attach, several clients")
        rates = [(count, *_rate(service, count)) for count in CLIENTS]
        say(f"attach, beside {REQUESTS_PER_SECOND} admin requests a second")
        with _admin_requests(service) as latencies:
            beside: Times = service.client("latency")
    say(f"attach, restart with {MANY_SLOTS:,} blocks")
    return [
        _latency_table(runs),
        _busy_table(beside, latencies),
        _own_table([wire for _, wire in runs["worn"]]),
        _rate_table(rates),
        _restart_table(_restart()),
    ]


def run_liar(say: Callable[[str], None]) -> Table:
    """Measure lookups beside an engine that sends the slowest calls. This is a part of `python -m bench holds`."""
    say(f"look-ups beside an engine that sends the worst calls, {SLOTS:,} slots")
    with _filled_service(SLOTS, "worn") as service:
        return _liar_table(_answer("bench.liar", str(service.path), str(SLOTS)))


class _Service:
    """A `kvstow serve` with its own paths, and with memory for a number of slots."""

    def __init__(self, folder: Path, slots: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.path = folder / "run" / "attach.sock"
        self.slots = slots
        memory = -(-slots * SLOT_BYTES // (2 * _MIB)) * 2 * _MIB
        self._command = [
            *(sys.executable, "-m", "kvstow_service", "serve", "--memory", str(memory), "--port", str(self.port)),
            *("--attach-socket", str(self.path), "--state", str(folder / "state"), "--log-level", "warning"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def start(self) -> None:
        self.started = time.monotonic()
        self._process = subprocess.Popen(self._command)

    def wait_live(self) -> float:
        """Return the seconds from the start until `/livez` answers 200."""
        while time.monotonic() < self.started + _START_SECONDS:
            try:
                self.get("/livez")
            except OSError:
                time.sleep(0.005)
                continue
            return time.monotonic() - self.started
        raise TimeoutError("the service does not answer")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10.0) as answer:
            return answer.read()

    @property
    def anonymous_bytes(self) -> int:
        """Return the anonymous memory of the process. The pool and the journal, which are shared memory, do not
        count."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    def client(self, mode: str) -> Any:
        return _answer("bench.attachclient", str(self.path), str(self.slots), mode)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def _service(slots: int) -> Iterator[_Service]:
    with TemporaryDirectory(prefix="kvstow-bench-") as folder:
        service = _Service(Path(folder), slots)
        service.start()
        try:
            service.wait_live()
            yield service
        finally:
            service.stop()


@contextmanager
def _filled_service(slots: int, pool: str) -> Iterator[_Service]:
    with _service(slots) as service:
        service.client("wear" if pool == "worn" else "fill")
        yield service


def _answer(name: str, *arguments: str) -> Any:
    with running(name, *arguments) as process:
        return answer_of(process)


def _rate(service: _Service, count: int) -> tuple[float, list[float]]:
    """Return how many lookups per second `count` clients make together, and the times of all their lookups."""
    with _together(count, service) as clients:
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        found = [seconds for client in clients for seconds in answer_of(client)["lookup"]]
    return len(found) / _RATE_SECONDS, found


@contextmanager
def _together(count: int, service: _Service) -> Iterator[list[subprocess.Popen[str]]]:
    if not count:
        yield []
        return
    arguments = (str(service.path), str(service.slots), "rate", str(_RATE_SECONDS))
    with running("bench.attachclient", *arguments) as client, _together(count - 1, service) as others:
        yield [client, *others]


@contextmanager
def _admin_requests(service: _Service) -> Iterator[list[float]]:
    """Make the requests of operators and their tools, including scrapes, at a steady pace. Yields the seconds that each
    took."""
    pool = json.loads(service.get("/v1/pools"))["items"][0]["name"]
    paths = ["/metrics", "/readyz", "/v1/stats", "/v1/readiness", f"/v1/pools/{pool}", "/v1/transfers"]
    paths += ["/v1/sessions", "/livez", "/v1/namespaces"]  # keys of blocks would need a token
    taken: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        due = time.monotonic()
        while not stop.is_set():
            begun = time.perf_counter()
            service.get(paths[len(taken) % len(paths)])
            taken.append(time.perf_counter() - begun)
            due += 1 / REQUESTS_PER_SECOND
            stop.wait(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()


def _restart() -> dict[str, float]:
    """Kill a service with a full pool, start it again, and return the times."""
    with _filled_service(MANY_SLOTS, "fresh") as service:
        memory = service.anonymous_bytes
        service.client("found")
        service.kill()
        service.start()
        live = service.wait_live()
        found = service.client("found") - service.started
        return {"live": live, "found": found, "memory": memory, "memory_after": service.anonymous_bytes}


def _latency_table(runs: dict[str, list[tuple[Times, Times]]]) -> Table:
    rows = []
    for name, title in (("lookup", "look up"), ("use", "look up, lease, release")):
        for pool, found in runs.items():
            inside, inside_late = (median(_p(times[name], share) for times, _ in found) for share in (0.5, 0.99))
            wire, late = (median(_p(times[name], share) for _, times in found) for share in (0.5, 0.99))
            bar = ""
            if name == "lookup":
                met, in_time = verdict(wire <= _RATIO_BAR * inside), verdict(late <= _P99_BAR)
                bar = f"{_RATIO_BAR:g} x, {met}; p99 {_us(_P99_BAR)}, {in_time}"
            cells = [f"{_us(inside)} / {_us(inside_late)}", f"{_us(wire)} / {_us(late)}", f"{wire / inside:.2f} x", bar]
            rows.append([f"{title}, {pool} pool", *cells])
    head = ["1,000 keys, p50 / p99", "in process", "over the wire", "p50 to p50", "bar"]
    return Table(f"Calls, one client, {SLOTS:,} slots", head, rows)


def _busy_table(found: Times, requests: Sequence[float]) -> Table:
    rows = []
    for name, title in (("lookup", "look up"), ("use", "look up, lease, release")):
        late = _p(found[name], 0.99)
        bar = f"p99 {_us(_BUSY_BAR)}: {verdict(late <= _BUSY_BAR)}" if name == "lookup" else ""
        rows.append([title, _us(_p(found[name], 0.5)), _us(late), bar])
    rows.append(["an admin request", _us(_p(requests, 0.5)), _us(_p(requests, 0.99)), f"{len(requests)} requests"])
    title = f"Beside {REQUESTS_PER_SECOND} admin requests a second, scrapes included, worn pool"
    return Table(title, ["1,000 keys", "p50", "p99", "bar"], rows)


def _liar_table(found: Times) -> Table:
    without, beside = ([_p(found[name], share) for share in (0.5, 0.99)] for name in ("without", "with"))
    met = verdict(beside[1] - without[1] <= _LIAR_BAR)
    rows = [
        ["without it", _us(without[0]), _us(without[1]), ""],
        ["beside it", _us(beside[0]), _us(beside[1]), f"p99 at most {_us(_LIAR_BAR)} more: {met}"],
    ]
    title = "Look-ups beside an engine that sends the calls that take longest, worn pool"
    return Table(title, ["1,000 keys", "p50", "p99", "bar"], rows)


def _own_table(runs: Sequence[Times]) -> Table:
    send, take, idle = (median(_p(found[name], 0.5) for found in runs) for name in ("send", "take", "idle"))
    rows = [
        ["send a look-up", _us(send), ""],
        ["take its answer", _us(take), ""],
        ["both", _us(send + take), f"{_us(_OWN_BAR)}: {verdict(send + take <= _OWN_BAR)}"],
        ["an idle step", _us(idle), f"{_us(_IDLE_BAR)}: {verdict(idle <= _IDLE_BAR)}"],
    ]
    return Table("The client's own share, 1,000 keys, p50 of CPU time", ["", "time", "bar"], rows)


def _rate_table(rates: Sequence[tuple[int, float, list[float]]]) -> Table:
    rows = []
    for count, rate, times in rates:
        bar = f"{_RATE_BAR:,} on 16 cores: {verdict(rate >= _RATE_BAR)} on {os.cpu_count()}" if count == 8 else ""
        rows.append([str(count), f"{rate:,.0f}", _us(_p(times, 0.5)), _us(_p(times, 0.99)), bar])
    return Table("Look-ups of 1,000 keys without a pause", ["clients", "a second", "p50", "p99", "bar"], rows)


def _restart_table(found: dict[str, float]) -> Table:
    least = _BASE_BYTES + MANY_SLOTS * _SLOT_BYTES
    rows = [
        ["`/livez` says 200", f"{found['live']:.2f} s", f"{_LIVE_BAR:g} s: {verdict(found['live'] <= _LIVE_BAR)}"],
        [
            "an engine that attaches then finds its prefix",
            f"{found['found']:.2f} s",
            f"{_INDEX_BAR:g} s: {verdict(found['found'] <= _INDEX_BAR)}",
        ],
    ]
    for name, title in (("memory", "before"), ("memory_after", "after")):
        met = verdict(found[name] <= least)
        rows.append(
            [
                f"the service's own memory {title} it",
                f"{found[name] / _MIB:,.0f} MiB",
                f"{least / _MIB:,.0f} MiB: {met}",
            ]
        )
    title = f"A service with {MANY_SLOTS:,} blocks is killed and started again"
    return Table(title, ["from the start of its process", "", "bar"], rows)


def _p(times: Sequence[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"
