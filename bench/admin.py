"""The admin server beside traffic: the latency of `/metrics` and `/v1/overview`, and what requests cost the
scheduler's steps.

The server and the traffic share one process, as in production. The client is in this process.
"""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.admin_host import ADMIN_TOKEN
from bench.machine import wait_until_quiet
from bench.report import Table, verdict
from bench.subject import CHAIN_BLOCKS, STORE_BLOCKS

RANKS = 8
REQUESTS_PER_SECOND = 50
_SCRAPES_PER_SECOND = 40  # many more than Prometheus makes, so that a few seconds give a 99th percentile
_PACED_REPLAY = 100.0  # requests per second, which is more than one engine serves
_METRICS_BAR = 0.010
_STEP_BAR = 1.05
_TURNS = 3
_MINUTE = 60.0
_PATIENCE_SECONDS = 8.0
_SETTLE_SECONDS = 1.0

# The requests of operators and their tools. The last one changes something.
_MIX: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/metrics", None),
    ("GET", "/readyz", None),
    ("GET", "/v1/stats", None),
    ("GET", "/v1/readiness", None),
    ("GET", "/v1/pools/host", None),
    ("GET", "/v1/transfers", None),
    ("GET", "/v1/ranks", None),
    ("GET", "/v1/pools/host/blocks", None),
    ("GET", "/livez", None),
    ("POST", "/v1/pools/host/evict", {"slots": 1}),
)


class Host:
    """The child process with the admin server."""

    def __init__(self, slots: int, running: ExitStack) -> None:
        self._process = running.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "bench.admin_host", str(slots), str(RANKS)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self.port: int = self._answer()["port"]

    def switch(self, traffic: str, **options: Any) -> dict[str, Any]:
        """Change the traffic. Returns the figures of the traffic before."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"traffic": traffic, **options}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the admin server has ended; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(slots: int, seconds: float, say: Callable[[str], None]) -> list[Table]:
    with ExitStack() as running:
        host = Host(slots, running)
        client = http.client.HTTPConnection("127.0.0.1", host.port, timeout=30)
        running.callback(client.close)
        wait_until_quiet(_PATIENCE_SECONDS)
        metrics = _metrics(host, client, slots, seconds, say)
        steps = _steps(host, client, seconds, say)
        return [metrics, steps, _minute(host, client, slots, say)]


def _metrics(
    host: Host, client: http.client.HTTPConnection, slots: int, seconds: float, say: Callable[[str], None]
) -> Table:
    paced, flat_out = f"replay, {_PACED_REPLAY:g} requests/s", "replay as fast as it can"
    rows = []
    for path, title, traffic, rate in (
        ("/metrics", "no traffic", "idle", None),
        ("/metrics", paced, "replay", _PACED_REPLAY),
        ("/metrics", flat_out, "replay", None),
        ("/v1/overview", "no traffic", "idle", None),
        ("/v1/overview", paced, "replay", _PACED_REPLAY),
    ):
        host.switch(traffic, rate=rate)
        time.sleep(_SETTLE_SECONDS)
        p50, p99, most = _spread(_paced(client, (("GET", path, None),), _SCRAPES_PER_SECOND, seconds))
        figures = host.switch("idle")
        speed = f"{figures['requests_per_second']:,.0f}" if figures else "0"
        is_judged = traffic == "replay" and path == "/metrics"
        bar = f"{_METRICS_BAR * 1e3:g} ms, {verdict(p99 <= _METRICS_BAR)}" if is_judged else ""
        rows.append([path, title, speed, _ms(p50), _ms(p99), _ms(most), bar])
        say(f"{path}, {title}: p99 {_ms(p99)}")
    head = ["path", "traffic", "requests/s replayed", "p50", "p99", "longest", "bar for p99"]
    title = f"Answers at {slots:,} slots and {RANKS} ranks"
    return Table(title, head, rows)


def _steps(host: Host, client: http.client.HTTPConnection, seconds: float, say: Callable[[str], None]) -> Table:
    """Measure steps with and without requests by turns. The steps of all turns are evaluated together."""
    found: dict[bool, dict[str, list[float]]] = {busy: {"calls": [], "steps": []} for busy in (False, True)}
    latencies: list[float] = []
    for _ in range(_TURNS):
        for busy, figures in found.items():
            host.switch("steps")
            if busy:
                latencies += _paced(client, _MIX, REQUESTS_PER_SECOND, seconds)
            else:
                time.sleep(seconds)
            for name, values in host.switch("idle").items():
                figures[name] += values
    say("steps of the scheduler")
    rows = []
    for name, title in (("steps", "step: 20 ms elsewhere, then the engine's calls"), ("calls", "the engine's calls")):
        for label, index in (("p50", 0), ("p99", 1)):
            alone, beside = (_spread(found[state][name])[index] for state in (False, True))
            judged = (name, label) == ("steps", "p99")
            bar = f"{_STEP_BAR:g}, {verdict(beside <= _STEP_BAR * alone)}" if judged else ""
            rows.append([f"{title}, {label}", _ms(alone), _ms(beside), f"{beside / alone:.2f}", bar])
    p50, p99, _ = _spread(latencies)
    rows.append(["an admin request, p50 / p99", "", f"{_ms(p50)} / {_ms(p99)}", "", ""])
    head = ["", "no requests", f"{REQUESTS_PER_SECOND} requests/s", "ratio", "bar"]
    title = f"Steps of {CHAIN_BLOCKS:,} blocks used and {STORE_BLOCKS} stored"
    return Table(title, head, rows)


def _minute(host: Host, client: http.client.HTTPConnection, slots: int, say: Callable[[str], None]) -> Table:
    host.switch("replay", rate=_PACED_REPLAY)
    latencies = _paced(client, _MIX, REQUESTS_PER_SECOND, _MINUTE)
    figures = host.switch("idle")
    p50, p99, most = _spread(latencies)
    say(f"a minute of {REQUESTS_PER_SECOND} requests/s: {len(latencies)} answered, p99 {_ms(p99)}")
    replayed = f"{figures['requests_per_second']:,.0f}"
    title = (
        f"A minute of {REQUESTS_PER_SECOND} admin requests/s beside a replay at {slots:,} slots and {RANKS} ranks; "
        "one that fails would end the benchmark"
    )
    head = ["", "requests/s replayed", "answered", "p50", "p99", "longest"]
    return Table(title, head, [["all admin requests", replayed, f"{len(latencies):,}", _ms(p50), _ms(p99), _ms(most)]])


def _paced(
    client: http.client.HTTPConnection, mix: Sequence[tuple[str, str, Any]], rate: float, seconds: float
) -> list[float]:
    """Make `rate` requests per second. Returns the seconds from each request to the last byte of its answer."""
    client.close()  # the server has closed the idle connection; the next request connects again
    latencies: list[float] = []
    started = time.perf_counter()
    for number, (method, path, body) in enumerate(itertools.cycle(mix)):
        due = started + number / rate
        if due > started + seconds:
            return latencies
        time.sleep(max(0.0, due - time.perf_counter()))
        latencies.append(_ask(client, method, path, body))
    raise AssertionError("the cycle has no end")


def _ask(client: http.client.HTTPConnection, method: str, path: str, body: Any) -> float:
    asked = time.perf_counter()
    payload = None if body is None else json.dumps(body)
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}  # those without it get a small share of the CPU, and wait
    if payload:
        headers["Content-Type"] = "application/json"
    client.request(method, path, payload, headers)
    answer = client.getresponse()
    text = answer.read()
    took = time.perf_counter() - asked
    if answer.status not in (200, 202):
        raise RuntimeError(f"{method} {path} answered {answer.status}: {text[:200]!r}")
    return took


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the longest time."""
    cuts = quantiles(values, n=100)
    return cuts[49], cuts[98], max(values)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"
