"""What the two halves of the connector say to each other through vLLM; picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstow.messages import Completion, DesiredState, RankReport
from kvstow_service.agent import AdminAddress
from kvstow_service.connectors.vllm.stepplan import PlannedStep


@dataclass(frozen=True)
class RankHello(KVConnectorHandshakeMetadata):
    """What a rank is. `max_slots`: how many its address space has room for. `node`: where it runs (`this_node`);
    `node_bytes`: what the pools of all ranks there could have together."""

    rank: int
    slot_bytes: int
    max_slots: int
    node: str
    node_bytes: int


@dataclass(frozen=True)
class KVStowMetadata(KVConnectorMetadata):
    """From the scheduler side, with every step. `plan` is None until the scheduler side knows all ranks. `desired`
    answers ranks that have reported with a step."""

    plan: PlannedStep | None = None
    admin: AdminAddress | None = None
    desired: Mapping[int, DesiredState] = field(default_factory=dict)


class RankNews(NamedTuple):
    """What a rank has to say after a step. `completions` are of the boot `boot_id`. `hello` comes with its first word,
    `report` while its agent does not reach the admin server."""

    completions: tuple[tuple[str, tuple[Completion, ...]], ...] = ()
    hello: RankHello | None = None
    report: RankReport | None = None


@dataclass
class KVStowWorkerMetadata(KVConnectorWorkerMetadata):
    """From the ranks, with every step that has news."""

    news: dict[int, list[RankNews]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStowWorkerMetadata)
        merged = {rank: list(news) for rank, news in self.news.items()}
        for rank, news in other.news.items():
            merged.setdefault(rank, []).extend(news)
        return KVStowWorkerMetadata(merged)
