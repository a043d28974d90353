"""KVStow's connector with a check that each loaded block has the contents with which it was stored.

Equal answers show that vLLM computed the same. This check shows that the bytes are the same, however kernels round. It
takes a fingerprint of every block on the compute stream, before its store begins and after its load has ended. Engines
with the same folder share fingerprints by slot, as engines that are attached to one service share slots.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstow.messages import Op
from kvstow_service.connectors.vllm.connector import KVStowConnector
from kvstow_service.connectors.vllm.rankdataplane import kv_geometry

FOLDER = "BENCH_VLLM_CHECKS"
"""An environment variable with the folder to which each process of a rank writes `RANK-PID.json`, every second."""

_SLOTS = 1 << 22  # the most slots


@dataclass(frozen=True, slots=True)
class Checks:
    """Counts of loaded blocks over all ranks and engines: checked ones, and those with other bytes. `told_apart` counts
    neighbours in a load whose fingerprints differ. Without such neighbours, equal fingerprints would prove nothing."""

    blocks: int
    wrong: int
    told_apart: int


def read_checks(folder: Path) -> Checks:
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return Checks(*(sum(rank[key] for rank in ranks) for key in ("blocks", "wrong", "told_apart")))


class CheckedKVStowConnector(KVStowConnector):
    """A `KVStowConnector` with checks. They run in the order of the compute stream, and wait for the device in steps
    with stores.

    The fingerprints of an op are written, or read, when it begins. Later its slots may belong to another engine,
    because the service frees the slots of a lost session as soon as its copies have ended.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._seen = 0
        self._loads: dict[int, tuple[Op, torch.Tensor]] = {}
        self._checks_due: list[tuple[Op, torch.Tensor]] = []
        self._written_at = 0.0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        path = Path(os.environ[FOLDER]) / f"{self._rank.side.rank}.fingerprints"
        with path.open("ab") as file:
            file.truncate(8 * _SLOTS)  # the file is sparse
        self._stored = np.memmap(path, np.int64, "r+")
        self._tensors = kv_geometry(kv_caches, self._num_blocks).tensors
        device = self._tensors[0].device
        generator = torch.Generator().manual_seed(0)
        self._weights = [
            torch.randint(-(1 << 62), 1 << 62, (tensor.shape[1] // 8,), generator=generator).to(device)
            for tensor in self._tensors
        ]
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)  # in the order of the fields of `Checks`

    def _begin_step(self, metadata: Any) -> None:
        plan = metadata.plan
        if plan is not None and plan.number != self._seen:
            self._seen = plan.number
            for op in plan.stores.ops:
                self._stored[list(op.slots)] = self._fingerprints(op.blocks).cpu().numpy()
            for op in plan.loads.ops:
                self._loads[op.op_id] = op, torch.from_numpy(self._stored[list(op.slots)])
            self._checks_due = [(op, torch.from_numpy(self._stored[list(op.slots)])) for op in plan.layered.ops]
        super()._begin_step(metadata)

    def wait_for_save(self) -> None:
        """Check loads by layer, too, for which the compute stream waits in this call at the latest."""
        super().wait_for_save()
        layered, self._checks_due = self._checks_due, []
        for op, stored in layered:
            self._check(op, stored)

    def build_connector_worker_meta(self) -> Any:
        metadata = super().build_connector_worker_meta()
        for update in (update for rank in (metadata.updates.values() if metadata else ()) for update in rank):
            for _, completions in update.completions:
                for completion in completions:
                    load = self._loads.pop(completion.op_id, None)
                    if load is not None and completion.mark == "done":
                        self._check(*load)
        return metadata

    def _check(self, op: Op, stored: torch.Tensor) -> None:
        expected = stored.to(self._counts.device)
        found = self._fingerprints(op.blocks)
        told_apart = (expected[1:] != found[:-1]).sum()
        self._counts += torch.stack([torch.ones_like(found).sum(), (expected != found).sum(), told_apart])
        if time.monotonic() > self._written_at + 1:
            self._written_at = time.monotonic()
            self._write()

    def _write(self) -> None:
        path = Path(os.environ[FOLDER]) / f"{self._rank.side.rank}-{os.getpid()}.json"
        counts = dict(zip(("blocks", "wrong", "told_apart"), self._counts.tolist(), strict=True))
        path.with_suffix(".new").write_text(json.dumps(counts))
        path.with_suffix(".new").replace(path)

    def _fingerprints(self, blocks: Sequence[int]) -> torch.Tensor:
        indices = self._indices(blocks)
        parts = [
            (tensor[indices].view(torch.int64) * weights).sum(dim=1)
            for tensor, weights in zip(self._tensors, self._weights, strict=True)
        ]
        return torch.stack(parts).sum(dim=0)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._counts.device)
