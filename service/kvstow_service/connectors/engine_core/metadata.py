"""Picklable messages between the two halves of the connector, which vLLM carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstow.attach.hello import NO_HOLD, GateHold, RankSession, SessionTicket
from kvstow.attach.identity import RegionIdentity
from kvstow.messages import LoadLaunch, StagedLoad
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.connectors.engine_core.stepplan import BootCompletions, LoadId, PlannedStep


class LoadedFiles(NamedTuple):
    """Which files a rank has loaded. `weights` and `files` are digests of the places to which the paths of the weights,
    and of the model's other files, led after vLLM had loaded them (`Trail`). `changed_weights` and `changed_files`: a
    place on these paths that changed meanwhile; empty if none did. `problem`: why that is unknown, as a phrase."""

    weights: str
    files: str
    changed_weights: str = ""
    changed_files: str = ""
    problem: str = ""


@dataclass(frozen=True)
class RankHello(KVConnectorHandshakeMetadata):
    """A rank introduces itself. `max_slots`: how many slots fit in its address space. `node`: where it runs
    (`this_node`). `node_bytes`: memory available to the pools of all ranks on that node together. `num_ranks`: how many
    ranks the engine has; 0 if vLLM's configuration says so instead. `regions`: what its slots consist of, if the KV
    cache is torch tensors. `loaded`: None if the rank has not seen what it loaded. `is_alone`: vLLM has no other
    connector, which only its workers know."""

    rank: int
    slot_bytes: int
    max_slots: int
    node: str
    node_bytes: int
    regions: tuple[RegionIdentity, ...] = ()
    num_ranks: int = 0
    loaded: LoadedFiles | None = None
    is_alone: bool = True


@dataclass(frozen=True)
class KVStowMetadata(KVConnectorMetadata):
    """Sent by the scheduler side with every step. `plan` is None until the scheduler side knows all ranks. `admin` is
    the address for the reports of ranks that do not find the engine on their own host. `ticket` is that of the session
    with the node service. `hold` asks the ranks to let the session's ops through even after its end. `launches` are for
    ranks on JAX, which make them before the ops of `plan`. `lost` says why the blocks with which the step computes
    cannot be loaded, so that it must fail; None otherwise. `weight_changes`: how many calls that may change weights
    the scheduler side knows of, by rank."""

    plan: PlannedStep | None = None
    admin: AdminAddress | None = None
    ticket: SessionTicket | None = None
    hold: GateHold = NO_HOLD
    launches: tuple[LoadLaunch, ...] = ()
    lost: str | None = None
    weight_changes: Mapping[int, int] = field(default_factory=dict)


class RankUpdate(NamedTuple):
    """What a rank sends after a step. `hello` comes with the first update. `session` is sent when it has changed.
    `ended_loads` is sent if vLLM does not count the ranks itself, and `staged` by ranks on JAX. `timed_step` is the
    number of a step that is timed; rank 0 sends it when the step has ended. `layers_off` says why this rank cannot load
    by layer any more, and is sent once. `weight_changes` is how many calls that may change its weights this rank has
    noticed, with a sentence about the last one; it is sent while the scheduler side does not know of all of them."""

    completions: tuple[BootCompletions, ...] = ()
    hello: RankHello | None = None
    session: RankSession | None = None
    ended_loads: tuple[LoadId, ...] = ()
    timed_step: int = 0
    staged: tuple[StagedLoad, ...] = ()
    layers_off: str | None = None
    weight_changes: tuple[int, str] | None = None


@dataclass
class KVStowWorkerMetadata(KVConnectorWorkerMetadata):
    """Sent by the ranks, with every step after which a rank has something to report."""

    updates: dict[int, list[RankUpdate]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStowWorkerMetadata)
        merged = {rank: list(updates) for rank, updates in self.updates.items()}
        for rank, updates in other.updates.items():
            merged.setdefault(rank, []).extend(updates)
        return KVStowWorkerMetadata(merged)
