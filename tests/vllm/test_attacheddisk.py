"""A real engine on a node with a disk: blocks survive the engine, the service and its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import A_BLOCKS, A_HIT, A, B, C, Reference, assert_same, eventually
from tests.vllm.nodeservice import NodeService, is_attached

from kvstow_service.stores.disk.diskfiles import PathError, open_folder

pytestmark = pytest.mark.vllm

SECONDS = 120.0
ENVIRON = {"PYTHONHASHSEED": "0"}


class DiskNode:
    """A service with a disk and one engine, in one life."""

    def __init__(self, model: Path, folder: Path, disk: Path, stack: ExitStack) -> None:
        folder.mkdir()
        options = ("--disk", str(disk), "--disk-size", "256MiB")
        self.service = NodeService(folder, "64MiB", *options, module="tests.vllm.patientservice")
        stack.callback(self.service.stop)
        self.service.start()
        self.engine = EngineProcess(model, self.service.attach, folder / "engine", ENVIRON)
        stack.callback(self.engine.kill)
        eventually(lambda: is_attached(self.service), "an attached engine", SECONDS)
        eventually(self._is_on, "the disk", SECONDS)
        self.engine.be_patient(60)

    def tier(self) -> dict[str, Any]:
        (item,) = self.service.get("/v1/tier")["items"]
        return dict(item)

    def part(self) -> dict[str, Any]:
        (part,) = self.service.get("/v1/tier")["parts"]
        return dict(part)

    def _is_on(self) -> bool:
        view = self.service.get("/v1/tier")
        return bool(view["items"]) and [part["state"] for part in view["parts"]] == ["on"]

    def kill(self) -> None:
        """The engine and the service, and with them all memory: there is no keeper."""
        self.engine.kill()
        self.service.kill()


Live = Callable[[Path, str], DiskNode]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        os.close(open_folder(disk))
    except PathError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        yield lambda model, name: DiskNode(model, tmp_path / name, disk, stack)


def test_the_first_request_after_everything_was_killed_hits_from_the_disk(
    model: Path, reference: Reference, live: Live
) -> None:
    expected = dict(zip((A, B, C), reference(model, A, B, C), strict=True))
    before = live(model, "before")
    assert_same(before.engine.ask(A, C), [expected[A], expected[C]])

    def are_written() -> bool:
        """What did not fit into the writes under way is written when it is used again."""
        assert_same(before.engine.ask(A, C), [expected[A], expected[C]])
        return bool(before.part()["blocks"] >= 2 * A_BLOCKS)

    eventually(are_written, "the writes", SECONDS)
    before.kill()

    after = live(model, "after")
    assert after.part()["blocks"] >= 2 * A_BLOCKS
    answers = after.engine.ask(A)
    assert_same(answers, [expected[A]])
    assert answers[0].cached == A_HIT
    assert after.tier()["counters"]["read_blocks"] >= A_BLOCKS
    assert_same(after.engine.ask(B, C), [expected[B], expected[C]])
