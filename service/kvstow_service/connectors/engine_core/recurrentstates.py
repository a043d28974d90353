"""States of recurrent layers (Mamba): blocks that sum up all tokens before them instead of holding some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstow_service.connectors.engine_core.gpublocks import GPUBlocks
from kvstow_service.connectors.engine_core.stores import Stores


class RecurrentStates:
    """Stores the states that vLLM hands over at block boundaries (vLLM 0.30, `mamba_cache_mode` "align").

    vLLM hands a state over with the step that computes it, so the state is read one step later. It is referenced until
    then. A request's block table does not contain states: their blocks are taken as they are handed over, under the
    hash by which vLLM caches them. Used by the scheduler's thread.
    """

    def __init__(self, gpu: GPUBlocks, stores: Stores) -> None:
        self._gpu, self._stores = gpu, stores
        self._waiting: list[tuple[Any, bytes]] = []  # blocks, and their hashes when they were handed over

    @property
    def are_waiting(self) -> bool:
        """Whether states wait for the step that computes them."""
        return bool(self._waiting)

    def blocks_computed(self, step: Any) -> list[int]:
        """Blocks of the states that this step computes."""
        return [block_id for states in _handed_over(step).values() for _, block_id, _ in states]

    def follow_step(self, step: Any) -> None:
        """Store what the previous step handed over, as far as vLLM still caches it. Then take over the states of this
        step."""
        waiting, self._waiting = self._waiting, []
        cached = [(block, block_hash) for block, block_hash in waiting if block.block_hash == block_hash]
        hashes = [block_hash for _, block_hash in cached]
        self._stores.plan_store(self._gpu.offer_of(hashes, [block.block_id for block, _ in cached]))
        self._unreference(waiting)  # blocks that are being stored have their own references by now
        if self._gpu.hash_bytes:
            self._take_over(step)

    def forget_states(self) -> None:
        """Forget the waiting states: they belong to weights that were replaced."""
        waiting, self._waiting = self._waiting, []
        self._unreference(waiting)

    def _take_over(self, step: Any) -> None:
        """Take over the states of this step. Blocks of requests that have ended may belong to other requests by now."""
        states = _handed_over(step)
        gone = {*(step.preempted_req_ids or ()), *step.finished_req_ids} if states else ()
        blocks = [
            self._gpu.pool.blocks[block_id]
            for request_id, entries in states.items()
            if request_id not in gone
            for _, block_id, _ in entries
        ]
        kept = [block for block in blocks if not block.is_null and block.block_hash is not None]
        self._gpu.pool.touch(kept)
        self._waiting += [(block, block.block_hash) for block in kept]

    def _unreference(self, waiting: Sequence[tuple[Any, bytes]]) -> None:
        self._gpu.pool.free_blocks([block for block, _ in waiting])


def _handed_over(step: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """The (group, block, tokens) of each request's states."""
    handed_over = step.kv_connector_block_state
    return {} if handed_over is None else handed_over.boundary_state_offloads
