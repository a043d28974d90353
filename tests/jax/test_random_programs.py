"""Random programs of a host on JAX, under the real control plane: every element of the KV cache is checked."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from tests.jax.rank import Host, JaxRank

from kvstow.messages import Op, StepPlan

pytestmark = pytest.mark.jax

PROGRAMS, STEPS = 200, 12
KEYS, SLOTS, BLOCKS = 40, 16, 24


class Model(Host):
    """Computes blocks, stores and loads them. It overwrites the blocks of a store as soon as the plan is submitted: all
    gathers fit into memory in flight, so they are launched by then."""

    def __init__(self, rank: JaxRank, seed: int) -> None:
        super().__init__(rank, SLOTS)
        self.random = np.random.default_rng(seed)
        self.stored: dict[bytes, list[np.ndarray]] = {}
        """By key: the contents of its block, by layer."""
        self.loading: dict[int, tuple[Op, tuple[bytes, ...]]] = {}
        self.verified = self.blocks_stored = 0

    def step(self) -> None:
        ops: list[Op] = []
        busy = {block for op, _ in self.loading.values() for block in op.blocks}
        free = [block for block in self.random.permutation(BLOCKS).tolist() if block not in busy]
        keys = [bytes([key]) for key in self.random.integers(0, KEYS, self.random.integers(0, 7))]
        if self.random.random() < 0.6 and keys:
            blocks = free[: len(keys)]
            keys = keys[: len(blocks)]
            grant = self.engine.begin_store(keys, blocks)
            if grant.op is not None:
                contents = dict(zip(blocks, keys, strict=True))
                for block in grant.op.blocks:
                    self.stored[contents[block]] = self.rank.blocks([block])
                self.blocks_stored += len(grant.op.blocks)
                ops.append(grant.op)
        if self.random.random() < 0.5:
            present = [key for key in self.stored if self.engine.contains([key])[0]]
            wanted = [present[at] for at in self.random.permutation(len(present))[:5]]
            lease = self.engine.lease(wanted) if wanted else None
            stored = {block for op in ops for block in op.blocks}
            targets = [block for block in free if block not in stored][: len(wanted)]
            if lease is not None and len(targets) == len(wanted):
                op = self.engine.begin_load(lease, targets)
                self.loading[op.op_id] = op, tuple(wanted)
                ops.append(op)
            elif lease is not None:
                self.engine.release_lease(lease)
        self.rank.launch()
        self.rank.order.expect(ops)
        self.rank.plane.submit(StepPlan(tuple(ops)))
        loading = {block for op, _ in self.loading.values() for block in op.blocks}
        written = [block for block in self.random.permutation(BLOCKS).tolist() if block not in loading]
        self.rank.overwrite(written[: self.random.integers(0, 8)])
        self.collect()

    def collect(self) -> None:
        completions = self.rank.collect()
        repeated = completions + completions[:1]  # a word that is said twice changes nothing
        self.engine.complete(0, self.rank.plane.boot_id, repeated)
        for settled in self.engine.take_settled():
            if settled.direction == "load" and settled.mark != "source_free":
                assert settled.mark == "done"
                op, keys = self.loading.pop(settled.op_id)
                for block, key in zip(op.blocks, keys, strict=True):
                    self.rank.put([block], self.stored[key])
                    self.verified += 1

    def finish(self) -> None:
        self.settle()
        assert self.rank.wrong_elements() == 0
        self.engine.check_integrity()


@pytest.mark.parametrize("host_memory", ["plain", "pinned"])
def test_random_programs_leave_no_wrong_element(make_rank: Callable[..., JaxRank], host_memory: str) -> None:
    rank = make_rank(num_slots=SLOTS, num_blocks=BLOCKS, host_memory=host_memory, seed=len(jax.devices()))
    verified = stored = 0
    for seed in range(PROGRAMS):
        host = Model(rank, seed)
        for _ in range(STEPS):
            host.step()
        host.finish()
        verified, stored = verified + host.verified, stored + host.blocks_stored
    assert verified > PROGRAMS
    assert stored > PROGRAMS
