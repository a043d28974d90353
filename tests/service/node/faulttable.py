"""Makes faults of real processes, and prints what the service says of each, and after how many seconds:

    python -m tests.service.node.faulttable

Everything here runs without a GPU. It takes about two minutes. A row without an answer ends it with status 1.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tests.service.node.keepers import end_keeper, look
from tests.service.node.realservice import RealService

_PATIENCE_SECONDS = 60.0


class Row(NamedTuple):
    """`seconds` is None if nothing told of the fault in time."""

    fault: str
    where: str
    seconds: float | None
    what: str


def eventually(condition: Callable[[], Any], what: str = "", *, seconds: float = _PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


class Table:
    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.rows: list[Row] = []

    @contextmanager
    def service(self, *options: str) -> Any:
        """A service in a folder of its own, and a client of it."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        service = RealService(folder, eventually)
        with service.running:
            yield service, service.serve("--memory", "64MiB", "--extent-size", "2MiB", *options), folder

    def told(self, fault: str, client: httpx.Client, name: str) -> None:
        """How long it takes until the doctor has the condition."""
        begun, found = time.monotonic(), dict[str, str]()

        def is_told() -> bool:
            found.update({one["name"]: one["what"] for one in client.get("/v1/doctor").json()["conditions"]})
            return name in found

        self._add(fault, f"doctor: {name}", begun, is_told, lambda: found[name])

    def failing(self, fault: str, client: httpx.Client, check: str) -> None:
        """How long it takes until the check of readiness fails."""
        begun, text = time.monotonic(), [""]

        def fails() -> bool:
            answer = client.get(f"/readyz/{check}?verbose")
            text[0] = answer.text.splitlines()[0]
            return answer.status_code == 503

        self._add(fault, f"/readyz/{check}", begun, fails, lambda: text[0])

    def _add(self, fault: str, where: str, begun: float, is_told: Callable[[], bool], what: Callable[[], str]) -> None:
        try:
            eventually(is_told)
            row = Row(fault, where, time.monotonic() - begun, what())
        except TimeoutError:
            row = Row(fault, where, None, "nothing")
        self.rows.append(row)
        seconds = "never" if row.seconds is None else f"{row.seconds:.1f} s"
        print(f"{row.fault:52} {seconds:>7}  {row.where}: {row.what[:150]}", flush=True)


def with_a_keeper(table: Table) -> None:
    with table.service("--state", str(table._folder / "state")) as (_, client, _folder):
        eventually(lambda: client.get("/startupz").status_code == 200)
        keeper = look(table._folder / "state").pid
        os.kill(keeper, signal.SIGSTOP)
        table.told("the keeper is stopped", client, "keeper")
        os.kill(keeper, signal.SIGCONT)
    end_keeper(table._folder / "state", signal.SIGKILL)
    with table.service("--state", str(table._folder / "none"), "--no-start-keeper") as (_, client, _folder):
        table.told("there is no keeper", client, "keeper")


def with_engines(table: Table) -> None:
    with table.service() as (service, client, _):
        engine, _ = service.engine()
        engine.send_signal(signal.SIGSTOP)
        table.told("an engine with nothing in flight is stopped", client, "session_stopped")
        table.told("its ranks report nothing meanwhile", client, "rank_silent")
        engine.send_signal(signal.SIGCONT)
        service.engine_later("--lose", "1")
        table.told("connections end, and processes keep the memory", client, "session_lost")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(service.socket))
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            table.told("something other than an engine connects", client, "rejected")
        client.put("/v1/drain", json={"mode": "all"})
        table.told("an operator drains the node", client, "drain")
        client.delete("/v1/drain")
        client.put("/v1/bypass", json={"load": True, "store": False})
        table.told("an operator bypasses loads", client, "bypass")
        service.process.send_signal(signal.SIGSTOP)
        time.sleep(8.0)
        service.process.send_signal(signal.SIGCONT)
        table.failing("the service itself was stopped for 8 s", client, "loop")


def with_orphans(table: Table) -> None:
    with table.service() as (service, _, _folder):
        service.engine()
        service.process.kill()
        with table.service() as (_, client, _other):
            table.told("engines of a service that is away have its memory", client, "orphaned_memory")


def with_tokens(table: Table) -> None:
    token = table._folder / "token"
    token.write_text("a-token")
    token.chmod(0o600)
    with table.service("--token-file", str(token)) as (_, client, _folder):
        token.chmod(0o644)
        table.told("other users may read the token file", client, "token_files")
        token.chmod(0o600)
        token.write_text("")
        table.told("the token file is emptied", client, "token_unusable")
        token.write_text("a-token")
        eventually(lambda: not client.get("/v1/doctor").json()["conditions"])
        token.unlink()
        table.told("the token file is removed", client, "token_unusable")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder))
        for part in (with_a_keeper, with_engines, with_orphans, with_tokens):
            part(table)
    missing = [row.fault for row in table.rows if row.seconds is None]
    print(f"{len(table.rows) - len(missing)} of {len(table.rows)} faults were told", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
