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
from kvstow.devices.jax.device import JaxDevice
from kvstow.devices.jax.loadbuffers import PlainBuffer
from kvstow.devices.jax.loads import LoadPiece
from kvstow.devices.jax.stores import Stores
from kvstow.messages import StepPlan

__all__ = ["make_cluster"]  # a fixture

pytestmark = pytest.mark.jax


def gather_after_the_step(patch: pytest.MonkeyPatch) -> None:
    submit = DataPlane.submit

    def submit_alone(self: DataPlane, plan: StepPlan) -> None:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(Stores, "launch", lambda *_, **__: None)
            submit(self, plan)

    patch.setattr(DataPlane, "submit", submit_alone)


def gather_rest_after_the_step(patch: pytest.MonkeyPatch) -> None:
    submit, launch = DataPlane.submit, Stores.launch

    def submit_alone(self: DataPlane, plan: StepPlan) -> None:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(Stores, "launch", lambda self, until=None: until and launch(self, until=until))
            submit(self, plan)

    patch.setattr(DataPlane, "submit", submit_alone)


def launch_on_the_copy_thread(patch: pytest.MonkeyPatch) -> None:
    advance = JaxDevice.advance

    def launch_too(self: JaxDevice) -> None:
        self._loads.launch()
        advance(self)

    patch.setattr(JaxDevice, "advance", launch_too)


def load_without_witness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadPiece, "is_written", lambda self: True)


def memory_freed_at_upload(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlainBuffer, "free_after_upload", True)


def alone(test: Callable[..., None]) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda make_rank, _: test(make_rank, "plain")


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (gather_after_the_step, alone(test_device.test_the_very_next_program_may_overwrite_the_blocks_of_a_store)),
        (gather_rest_after_the_step, alone(test_device.test_the_very_next_program_may_overwrite_the_blocks_of_a_store)),
        (launch_on_the_copy_thread, test_device.test_the_copy_thread_launches_no_program),
        (
            load_without_witness,
            lambda make_rank, patch: test_device.test_a_load_is_done_only_when_its_witness_is_ready(
                make_rank, patch, "plain"
            ),
        ),
        pytest.param(
            memory_freed_at_upload,
            alone(test_device.test_a_buffer_is_written_again_only_when_nothing_reads_it),
            marks=pytest.mark.skipif(jax.devices()[0].platform != "cpu", reason="other devices copy from the memory"),
        ),
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
