"""The failures of multi-host offload on JAX that others have had, put into the data plane one by one: a test of this
folder must notice each. Those of the control plane are in tests/engine/control; the first host's word is here, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from tests.engine.control.mutants import first_rank_decides
from tests.jax import test_device
from tests.jax.cluster import Cluster, Scheduler
from tests.jax.rank import JaxRank
from tests.jax.test_processes import STEPS, make_cluster

from kvstow.dataplane import DataPlane
from kvstow.devices.base import Fence
from kvstow.devices.jax import JaxDevice
from kvstow.devices.jax.deviceloads import LoadPiece
from kvstow.devices.jax.devicestores import GatheredPiece
from kvstow.messages import Op, StepPlan

__all__ = ["make_cluster"]  # a fixture

pytestmark = pytest.mark.jax


def gather_after_the_step(patch: pytest.MonkeyPatch) -> None:
    submit = DataPlane.submit
    waiting: list[Op] = []

    def submit_late(self: DataPlane, plan: StepPlan, after: Fence | None = None) -> None:
        ops, waiting[:] = tuple(waiting), plan.ops
        submit(self, StepPlan(ops, plan.launches))

    patch.setattr(DataPlane, "submit", submit_late)


def gather_rest_after_the_step(patch: pytest.MonkeyPatch) -> None:
    submit, launch_rest = DataPlane.submit, JaxDevice.launch_rest
    waiting: list[JaxDevice] = []

    def submit_late(self: DataPlane, plan: StepPlan, after: Fence | None = None) -> None:
        for device in waiting:
            launch_rest(device)
        waiting.clear()
        submit(self, plan)

    patch.setattr(JaxDevice, "launch_rest", lambda self: waiting.append(self))
    patch.setattr(DataPlane, "submit", submit_late)


def upload_on_the_copy_thread(patch: pytest.MonkeyPatch) -> None:
    is_written = LoadPiece.is_written

    def upload_too(self: LoadPiece) -> bool:
        for buffer in self.buffers:
            buffer.upload()
        return is_written(self)

    patch.setattr(LoadPiece, "is_written", upload_too)


def download_on_the_copy_thread(patch: pytest.MonkeyPatch) -> None:
    has_arrived = GatheredPiece.has_arrived

    def download_too(self: GatheredPiece) -> bool:
        for rows in self.arriving:
            jax.device_put(rows, rows.sharding)
        return has_arrived(self)

    patch.setattr(GatheredPiece, "has_arrived", download_too)


def load_without_witness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadPiece, "is_written", lambda self: True)


def alone(test: Callable[..., None]) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda make_rank, _: test(make_rank, "plain")


def in_memory(test: Callable[..., None]) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda make_rank, patch: test(make_rank, patch, "plain")


def no_other_thread(make_rank: Any, patch: pytest.MonkeyPatch) -> None:
    test_device.test_no_other_thread_gives_jax_work(make_rank, patch, "pinned")


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (gather_after_the_step, alone(test_device.test_the_very_next_program_may_overwrite_the_blocks_of_a_store)),
        (gather_rest_after_the_step, alone(test_device.test_the_very_next_program_may_overwrite_the_blocks_of_a_store)),
        (upload_on_the_copy_thread, no_other_thread),
        (download_on_the_copy_thread, no_other_thread),
        (load_without_witness, in_memory(test_device.test_a_load_is_done_only_when_its_witness_is_ready)),
        (load_without_witness, in_memory(test_device.test_a_buffer_is_written_again_only_when_no_program_reads_it)),
    ],
)
def test_taking_out_a_safeguard_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None],
    test: Callable[[Any, pytest.MonkeyPatch], None],
    make_rank: Callable[..., JaxRank],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test(make_rank, monkeypatch)


@pytest.mark.skipif(len(jax.devices()) == 1, reason="the processes have devices of their own: once is enough")
def test_a_completion_of_the_first_host_that_wins_is_noticed(
    make_cluster: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_rank_decides(monkeypatch)
    scheduler = Scheduler(make_cluster(2, 2), 1, slow=True, twice=False)
    for number in range(STEPS):
        scheduler.step(hold=number % 10 > 1)
    verdicts = scheduler.finish()
    assert sum(verdict.wrong_elements for verdict in verdicts) > 0
