from __future__ import annotations

import pytest
from tests.engine.tier.storecontract import StoreContract
from tests.service.tiers.mooncake.cluster import Cluster

from kvstow.tier.store import TierStore
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeStore

pytestmark = pytest.mark.tier


class TestMooncakeStore(StoreContract):
    @pytest.fixture
    def tier(self, shared_cluster: Cluster) -> TierStore:
        return MooncakeStore(shared_cluster.location)
