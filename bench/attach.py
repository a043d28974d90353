"""Look-ups of attached engines: over the wire against in process, and what several engines reach together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.machine import wait_until_quiet
from bench.report import Table, verdict

SLOTS = 200_000
CLIENTS = (1, 2, 4, 8)
_RATE_SECONDS = 3.0
_PATIENCE_SECONDS = 8.0
_RATIO_BAR, _P99_BAR, _RATE_BAR, _OWN_BAR, _IDLE_BAR = 2.2, 300e-6, 10_000, 100e-6, 20e-6

Times = dict[str, list[float]]


def run(repeats: int, say: Callable[[str], None]) -> list[Table]:
    runs: dict[str, list[tuple[Times, Times]]] = {"fresh": [], "worn": []}
    for turn in range(repeats):
        for pool, found in runs.items():
            busy = wait_until_quiet(_PATIENCE_SECONDS)
            say(f"attach, {pool} pool, run {turn + 1} of {repeats}, CPUs {busy:.0%} busy")
            with _host(pool) as (path, inside):
                found.append((inside, _latency(path)))
    with _host("worn") as (path, _):
        rates = [(count, *_rate(path, count)) for count in CLIENTS]
    say("attach, beside a busy thread")
    with _host("worn", "busy") as (path, _):
        beside = _latency(path)
    return [
        _latency_table(runs),
        _busy_table(beside),
        _own_table([wire for _, wire in runs["worn"]]),
        _rate_table(rates),
    ]


@contextmanager
def _host(*options: str) -> Iterator[tuple[str, Times]]:
    """The socket of a service in a process of its own, and its figures of calls in process."""
    with TemporaryDirectory() as folder:
        path = f"{folder}/attach.sock"
        with _module("bench.attachhost", path, str(SLOTS), *options) as process:
            yield path, _figures(process)


@contextmanager
def _module(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", name, *arguments],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _figures(process: subprocess.Popen[str]) -> Times:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has failed")
    found: Times = json.loads(line)
    return found


def _latency(path: str) -> Times:
    with _module("bench.attachclient", path, str(SLOTS), "latency") as client:
        return _figures(client)


def _rate(path: str, count: int) -> tuple[float, list[float]]:
    """Look-ups a second of `count` clients together, and the times of all their look-ups."""
    with _together(count, path) as clients:
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        found = [seconds for client in clients for seconds in _figures(client)["lookup"]]
    return len(found) / _RATE_SECONDS, found


@contextmanager
def _together(count: int, path: str) -> Iterator[list[subprocess.Popen[str]]]:
    if not count:
        yield []
        return
    with (
        _module("bench.attachclient", path, str(SLOTS), "rate", str(_RATE_SECONDS)) as client,
        _together(count - 1, path) as others,
    ):
        yield [client, *others]


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


def _busy_table(found: Times) -> Table:
    titles = {"lookup": "look up", "use": "look up, lease, release"}
    rows = [[title, _us(_p(found[name], 0.5)), _us(_p(found[name], 0.99))] for name, title in titles.items()]
    return Table("The same beside a busy thread, worn pool", ["1,000 keys", "p50", "p99"], rows)


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


def _p(times: Sequence[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"
