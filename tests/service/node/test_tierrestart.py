"""A node is killed while its transfers fill slots, and their process lives on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.service.node.keepers import end_keeper
from tests.service.node.noderunner import RunningNode
from tests.service.node.rawengine import NAMED, RawEngine, key_of
from tests.waiting import eventually

from kvstow.attach.calls import Lookup

pytestmark = pytest.mark.process

OURS = [key_of(number) for number in range(4)]
THEIRS = [key_of(number) for number in range(100, 106)]


class Restart:
    """A node, killed in the middle of a fetch, and the one after it."""

    def __init__(self, socket: Path, state: Path, environ: dict[str, str]) -> None:
        self.engines: list[RawEngine] = []
        self.nodes = [RunningNode(socket, state, environ, 8, "tier")]
        self.worker = 0
        try:
            engine = self._attach(socket)
            engine.store_until_found(OURS)
            self.worker = self.nodes[0].show()["worker"]
            calls = [engine.scheduler.call(Lookup(THEIRS))]

            def has_begun() -> bool:
                """Again, if the transfers had no memory yet."""
                if calls[-1].done:
                    calls.append(engine.scheduler.call(Lookup(THEIRS)))
                return bool(self.nodes[0].show()["gets"])

            engine.wait_for(has_begun)
            self.nodes[0].kill()
            self.nodes.append(RunningNode(socket, state, environ))
            self.engine = self._attach(socket, engine.welcome.token)  # nothing of the engine is under way any more
        except BaseException:
            self.close()
            raise

    def _attach(self, socket: Path, *settled: str) -> RawEngine:
        self.engines.append(RawEngine(socket, NAMED, settled))
        return self.engines[-1]

    @property
    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = self.nodes[-1].show()
        return found

    @property
    def pool(self) -> dict[str, Any]:
        (pool,) = self.shown["pools"].values()
        found: dict[str, Any] = pool
        return found

    def end_worker(self) -> None:
        if self.worker:
            with suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGKILL)
            self.worker = 0

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for node in self.nodes:
            node.close()
        self.end_worker()


@pytest.fixture
def after(tmp_path: Path, child_environ: dict[str, str]) -> Iterator[Restart]:
    with closing(Restart(tmp_path / "node" / "attach.sock", tmp_path / "state", child_environ)) as restart:
        yield restart
    end_keeper(tmp_path / "state")


def test_slots_stay_in_quarantine_until_the_process_of_the_former_transfers_has_ended(after: Restart) -> None:
    eventually(lambda: len(after.shown["sessions"]) == 2, "the end of the former engine's session")
    states = sorted(state for state, _ in after.shown["sessions"].values())
    assert states[-1] == "lost", "the transfers, as their process lives"
    assert (after.pool["quarantined"], after.pool["is_waiting"], after.pool["blocks"]) == (6, True, 4)
    after.end_worker()
    eventually(lambda: not after.pool["quarantined"], "the end of the quarantine")
    eventually(lambda: not after.pool["is_waiting"], "the pool")
    eventually(lambda: len(after.shown["sessions"]) == 1, "the end of the transfers' session")
    after.engine.wait_for(lambda: after.engine.load(OURS) == 4)
    assert after.shown["faults"] == 0
