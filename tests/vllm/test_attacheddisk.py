"""A real engine on a node with a disk: blocks survive the engine, the service and its memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import A_BLOCKS, A_HIT, A, B, C, Reference, assert_same, eventually
from tests.vllm.storednode import SECONDS, StoredNode

from kvstow_service.stores.disk.diskfiles import PathError, open_folder

pytestmark = pytest.mark.vllm


class DiskNode(StoredNode):
    """Its store is one disk."""

    def __init__(self, model: Path, folder: Path, disk: Path, stack: ExitStack) -> None:
        super().__init__(model, folder, ("--disk", str(disk), "--disk-size", "256MiB"), stack)

    def part(self) -> dict[str, Any]:
        (part,) = self.service.get("/v1/tier")["parts"]
        return dict(part)

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
    model: Path, reference: Reference, live: Live, tmp_path: Path
) -> None:
    expected = dict(zip((A, B, C), reference(model, A, B, C), strict=True))
    before = live(model, "before")
    assert_same(before.engine.ask(A, C), [expected[A], expected[C]])

    def are_written() -> bool:
        """What did not fit into the writes under way is written when it is used again."""
        assert_same(before.engine.ask(A, C), [expected[A], expected[C]])
        return bool(before.part()["blocks"] >= 2 * A_BLOCKS)

    eventually(are_written, "the writes", SECONDS)
    fingerprint = before.tier()["fingerprint"]
    before.kill()

    elsewhere = tmp_path / "model"
    shutil.copytree(model, elsewhere)
    after = live(elsewhere, "after")
    assert after.tier()["fingerprint"] == fingerprint is not None, "the place of the model does not count"
    assert after.part()["blocks"] >= 2 * A_BLOCKS
    answers = after.engine.ask(A)
    assert_same(answers, [expected[A]])
    assert answers[0].cached == A_HIT
    assert after.tier()["counters"]["read_blocks"] >= A_BLOCKS
    assert_same(after.engine.ask(B, C), [expected[B], expected[C]])
