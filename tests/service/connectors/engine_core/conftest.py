from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.service.connectors.engine_core.tieredvllmhost import MakeHost, TierHost

from kvstow.testing.tier import ControlledStore


@pytest.fixture
def store() -> Iterator[ControlledStore]:
    store = ControlledStore()
    yield store
    for gate in (store.puts, store.gets, store.lookups):
        gate.open()


@pytest.fixture
def make(store: ControlledStore) -> Iterator[MakeHost]:
    hosts: list[TierHost] = []

    def make(**options: object) -> TierHost:
        hosts.append(TierHost(store, **options))  # type: ignore[arg-type]
        return hosts[-1]

    yield make
    for gate in (store.puts, store.gets, store.lookups):
        gate.open()
    for host in hosts:
        host.tier.close()
