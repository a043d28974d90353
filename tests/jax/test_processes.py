"""Several ranks in processes of their own, whose model exchanges something in every step. A program of KVStow that
needed the other ranks would hang them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from tests.jax.cluster import Cluster, Scheduler
from tests.jax.rankprocess import Verdict

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(len(jax.devices()) == 1, reason="the processes have devices of their own: once is enough"),
]

STEPS = 60
MANY_STEPS = 10_000


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(num_ranks: int, devices: int, **options: Any) -> Cluster:
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        clusters.append(Cluster([flags] * num_ranks, **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.kill()


def check(verdicts: list[Verdict]) -> None:
    """All ranks have launched the same, and loaded what was stored."""
    assert [verdict.wrong_elements for verdict in verdicts] == [0] * len(verdicts)
    assert [verdict.hidden_collectives for verdict in verdicts] == [0] * len(verdicts)
    assert {(verdict.ledger, verdict.launches) for verdict in verdicts} == {(verdicts[0].ledger, verdicts[0].launches)}


@pytest.mark.parametrize(
    ("num_ranks", "devices", "host_memory", "bytes_in_flight"),
    [(2, 2, "plain", 512 << 20), (2, 1, "pinned", 1), (4, 1, "pinned", 512 << 20)],
)
def test_ranks_of_which_one_is_slow_and_repeats_itself(
    make_cluster: Callable[..., Cluster], num_ranks: int, devices: int, host_memory: str, bytes_in_flight: int
) -> None:
    """Where memory in flight is used up, the host's thread waits for the copies, so they may not be held."""
    cluster = make_cluster(num_ranks, devices, host_memory=host_memory, bytes_in_flight=bytes_in_flight)
    scheduler = Scheduler(cluster, 1, slow=True, twice=True)
    for number in range(STEPS):
        scheduler.step(hold=number % 10 > 5 and bytes_in_flight > 1)
    verdicts = scheduler.finish()
    check(verdicts)
    assert verdicts[0].launches > STEPS
    assert scheduler.failed == 0
    assert scheduler.loaded > STEPS // 2
    assert scheduler.stored > STEPS // 2
    faults = scheduler.engine.stats().faults
    assert faults.stale_completions + faults.duplicate_completions > STEPS


def test_ranks_that_restart(make_cluster: Callable[..., Cluster]) -> None:
    """Each loses its pool, not its KV cache. What it had under way fails on all, and no old block is served."""
    scheduler = Scheduler(make_cluster(2, 2), 2, slow=True, twice=True)
    for number in range(STEPS):
        scheduler.step(restart={20: 0, 40: 1, 41: 0}.get(number), hold=number % 7 > 3)
    verdicts = scheduler.finish()
    check(verdicts)
    assert scheduler.engine.stats().faults.rank_restarts == 3
    assert scheduler.loaded > STEPS // 4
    assert scheduler.failed


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "devices", "host_memory"), [(2, 2, "plain"), (4, 1, "pinned")])
def test_many_steps(make_cluster: Callable[..., Cluster], num_ranks: int, devices: int, host_memory: str) -> None:
    """Random steps, with one slow rank whose copies are held, and restarts."""
    scheduler = Scheduler(make_cluster(num_ranks, devices, host_memory=host_memory), 3, slow=True, twice=True)
    restarts = 0
    for number in range(MANY_STEPS):
        restart = int(scheduler.random.integers(num_ranks)) if number % 400 == 399 else None
        restarts += restart is not None
        scheduler.step(restart=restart, hold=bool(scheduler.random.random() < 0.3))
    verdicts = scheduler.finish()
    check(verdicts)
    print(f"{verdicts[0].launches} launches, {scheduler.stored} blocks stored, {scheduler.loaded} loaded")
    assert scheduler.engine.stats().faults.rank_restarts == restarts
    assert scheduler.loaded > MANY_STEPS // 4
