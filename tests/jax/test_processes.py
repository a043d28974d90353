"""Several ranks in processes of their own, whose model exchanges something in every step. A program of KVStow that
needed the other ranks would hang them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from tests.jax.cluster import Cluster, Scheduler
from tests.jax.rankprocess import Verdict

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(len(jax.devices()) == 1, reason="the processes have devices of their own: once is enough"),
]

STEPS = 60


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(num_ranks: int, devices: int) -> Cluster:
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        clusters.append(Cluster(tmp_path, [flags] * num_ranks))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.kill()


def check(verdicts: list[Verdict]) -> None:
    assert [verdict.wrong_elements for verdict in verdicts] == [0] * len(verdicts)
    assert [verdict.hidden_collectives for verdict in verdicts] == [0] * len(verdicts)


@pytest.mark.parametrize(("num_ranks", "devices"), [(2, 2), (4, 1)])
def test_ranks_of_which_one_is_slow_and_repeats_itself(
    make_cluster: Callable[..., Cluster], num_ranks: int, devices: int
) -> None:
    scheduler = Scheduler(make_cluster(num_ranks, devices), 1, slow=True, twice=True)
    for number in range(STEPS):
        scheduler.step(hold=number % 10 > 5)
    verdicts = scheduler.finish()
    check(verdicts)
    assert all(verdict.ledgers == verdicts[0].ledgers for verdict in verdicts)
    assert verdicts[0].launches > STEPS
    assert scheduler.failed == 0
    assert scheduler.loaded > STEPS
    assert scheduler.stored > STEPS // 2
    faults = scheduler.engine.stats().faults
    assert faults.stale_completions + faults.duplicate_completions > STEPS


def test_ranks_that_restart(make_cluster: Callable[..., Cluster]) -> None:
    """Each loses its pool, not its KV cache. What it had under way fails on all, and no old block is served."""
    scheduler = Scheduler(make_cluster(2, 2), 2, slow=False, twice=True)
    for number in range(STEPS):
        scheduler.step(restart={20: 0, 40: 1, 41: 0}.get(number), hold=number % 7 > 3)
    check(scheduler.finish())
    assert scheduler.engine.stats().faults.rank_restarts == 3
    assert scheduler.loaded > STEPS // 2
