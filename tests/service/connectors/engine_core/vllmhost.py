"""vLLM's scheduler and its ranks in a few lines: as much as a connector's scheduler side depends on.

The engine and the scheduler side are real. A block's content is the key of what was computed into it, so a store that
reads too early or too late, and a load into the wrong block, show as wrong contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any

from tests.doubles.fakes import FakeClock
from tests.doubles.rank import FakeRank, make_ranks, store_keys
from tests.service.connectors.engine_core.blockpool import Block, FakeBlockPool

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import make_key
from kvstow_service.connectors.engine_core.adapters import Adapters
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LoadPath, LoadPolicy
from kvstow_service.connectors.engine_core.schedulerside import STEP_BLOCKS, SchedulerSide
from kvstow_service.connectors.engine_core.stepplan import PlannedStep

HASH_TOKENS = 2
FULL = KVGroup(0, 2, 1)
ONE_GROUP = KVGroups((FULL,), 2)
LARGE = KVGroup(1, 6, 3)
SHORT_WINDOW, WINDOW = KVGroup(1, 2, 1, window=3), KVGroup(1, 2, 1, window=5)
WITH_SHORT_WINDOW, WITH_WINDOW = KVGroups((FULL, SHORT_WINDOW), 2), KVGroups((FULL, WINDOW), 2)


@cache
def hashes_of(tokens: str) -> list[bytes]:
    """Chained hashes of the full hash blocks; a character is a token."""
    hashes, parent = [], b""
    for end in range(HASH_TOKENS, len(tokens) + 1, HASH_TOKENS):
        parent = blake2b(parent + tokens[end - HASH_TOKENS : end].encode(), digest_size=8).digest()
        hashes.append(parent)
    return hashes


def keys_of(tokens: str, group: KVGroup = FULL) -> list[bytes]:
    """Keys of the group's full blocks."""
    return _keys_of(tokens, group)


@cache
def _keys_of(tokens: str, group: KVGroup) -> list[bytes]:
    step = group.hashes_per_block
    return [make_key(group.index, block_hash) for block_hash in hashes_of(tokens)[step - 1 :: step]]


def gpu_hashes(tokens: str, group: KVGroup = FULL) -> list[bytes]:
    """As vLLM keeps them with the group's full blocks: all hashes that a block spans, then the group's id."""
    step, hashes = group.hashes_per_block, hashes_of(tokens)
    ends = range(step, len(hashes) + 1, step)
    return [b"".join(hashes[end - step : end]) + group.index.to_bytes(4, "big") for end in ends]


class FakeRequest:
    """vLLM's request; `tables` are the blocks that its scheduler has for it."""

    def __init__(self, request_id: str, tokens: str) -> None:
        self.request_id, self.tokens = request_id, tokens
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.skip_reading_prefix_cache = False
        self.lora_request: Any = None
        self.kv_transfer_params: Any = None
        self.tables: list[list[Block]] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return hashes_of(self.tokens)

    @property
    def all_token_ids(self) -> Sequence[int]:
        return list(map(ord, self.tokens))

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in table] for table in self.tables)


@dataclass
class Cached:
    """The part of `SchedulerOutput` on requests that ran before."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Any = field(default_factory=Cached)
    preempted_req_ids: Any = field(default=None, kw_only=True)

    @property
    def kv_connector_block_state(self) -> Any:
        """No states are handed over."""
        return None


class VllmHost:
    """Runs requests the way vLLM does: blocks are cached under the hash of what will be written when they are handed
    out, a step's plan is submitted before the step computes, and `num_computed_tokens` grows after the plan."""

    def __init__(
        self,
        groups: KVGroups = ONE_GROUP,
        *,
        gpu_blocks: int = 33,
        slots: int = 64,
        num_ranks: int = 1,
        lazy_blocks: int | None = None,
        events: Any = None,
        pinned: int | None = None,
        step_blocks: int = STEP_BLOCKS,
        drafts: bool = False,
        adapters: Adapters | None = None,
        reporting: bool = True,
        path: LoadPath = "async",
    ) -> None:
        """`pinned`: slots that the ranks report at the start, by default all. Without `reporting` they report later."""
        self.clock = FakeClock()
        self.engine = OffloadEngine(
            EngineConfig(slot_bytes=64, capacity_slots=slots, num_ranks=num_ranks), clock=self.clock
        )
        self.ranks = (
            make_ranks(self.engine, pinned) if reporting else [FakeRank(self.engine, rank) for rank in range(num_ranks)]
        )
        self._make_side(
            EmbeddedControl(self.engine),
            groups,
            gpu_blocks,
            lazy_blocks=lazy_blocks,
            events=events,
            step_blocks=step_blocks,
            drafts=drafts,
            adapters=adapters,
            path=path,
        )

    def _make_side(
        self,
        control: Any,
        groups: KVGroups,
        gpu_blocks: int,
        *,
        path: LoadPath,
        step_budget: float = 0.01,
        **options: Any,
    ) -> None:
        self.control: Any = control
        self.groups = groups
        self.pool = FakeBlockPool(gpu_blocks)
        self.observed: list[tuple[str, float]] = []
        self.policy = LoadPolicy(path, step_budget, 64, self.clock, least_tokens=8)
        self.side = SchedulerSide(
            control,
            groups,
            self.pool,
            observe=lambda name, value: self.observed.append((name, value)),
            policy=self.policy,
            clock=self.clock,
            **options,
        )
        self._placed: set[str] = set()  # requests that have their blocks for the step to come
        self._preempted: set[str] = set()
        self._running = Cached()

    # -- requests ---------------------------------------------------------------------------------------------

    def ask(self, request: FakeRequest, local: int = 0) -> int:
        found = self.side.find_hit(request, local)
        assert found is not None, "an embedded engine answers at once"
        return found

    def admit(self, request: FakeRequest, run: int = 0, *, local: int = 0, load: int = 0) -> None:
        """Give the request its blocks: the first `local` tokens are cached on the GPU, the `load` after them are
        promised, `run` are computed in this step. vLLM sets `num_computed_tokens` after that."""
        request.tables = [self._prefix(request, group, local, local + load) for group in self.groups.groups]
        if not load:
            self._allocate(request, local + run)
        self._placed.add(request.request_id)
        self.side.admit(request, request.block_ids, load)
        request.num_computed_tokens = local + load

    def resume(self, request: FakeRequest, run: int = 0, *, computed: int | None = None) -> None:
        """The load has ended, or there is more input; the request goes on from `computed` tokens (all, unless some load
        failed)."""
        if computed is not None:
            request.num_computed_tokens = computed
        self._allocate(request, request.num_computed_tokens + run)
        self._placed.add(request.request_id)
        self.side.admit(request, request.block_ids, 0)

    def run(self, request: FakeRequest, *, local: int = 0, copy: bool = True) -> PlannedStep:
        """Admit a request without a load, and compute all of it in one step."""
        count = request.num_tokens - local
        self.admit(request, count, local=local)
        return self.step({request: count}, copy=copy)

    def preempt(self, request: FakeRequest) -> None:
        self._free(request)
        self._preempted.add(request.request_id)
        request.num_computed_tokens = request.num_output_placeholders = 0

    def finish(self, request: FakeRequest) -> None:
        """vLLM hands over the blocks of computed tokens, and frees them."""
        ends = [-(-request.num_computed_tokens // group.block_tokens) for group in self.groups.groups]
        self.side.finish(request, [ids[:end] for ids, end in zip(request.block_ids, ends, strict=True)])
        self._free(request)

    def drop(self, request: FakeRequest) -> None:
        """The request ends before it was admitted."""
        self.side.finish(request, [[] for _ in self.groups.groups])

    # -- steps ------------------------------------------------------------------------------------------------

    def schedule(self, request: FakeRequest, count: int) -> None:
        """A request that ran before gets the blocks of its next `count` tokens, before others are admitted."""
        new = self._allocate(request, request.num_computed_tokens + count)
        self._running.req_ids.append(request.request_id)
        self._running.new_block_ids.append(new if any(new) else None)
        self._placed.add(request.request_id)

    def step(self, scheduled: dict[FakeRequest, int] | None = None, *, copy: bool = True) -> PlannedStep:
        """One step of vLLM. With `copy` the ranks run their ops at once, before the step computes."""
        scheduled = scheduled or {}
        for request, count in scheduled.items():
            if request.request_id not in self._placed:
                self.schedule(request, count)
        counts = {request.request_id: count for request, count in scheduled.items()}
        preempted, self._preempted = self._preempted, set()
        plan = self.side.plan_step(Output(counts, self._running, preempted_req_ids=preempted))
        self._placed, self._running = set(), Cached()
        self._submit(plan)
        if copy:
            self.copy()
        for request, count in scheduled.items():
            self._compute(request, count)
        return plan

    def copy(self) -> None:
        """The ranks run all that was submitted."""
        for rank in self.ranks:
            rank.run_all()

    def hand_out_next(self, *block_ids: int) -> None:
        """Have these free blocks come first in the GPU's queue."""
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        for block in blocks:
            self.pool.free_block_queue.remove(block)
        self.pool.free_block_queue.prepend_n(blocks)

    # -- what there is ----------------------------------------------------------------------------------------

    def store(self, *keys: bytes) -> None:
        """Have the pool hold these blocks."""
        store_keys(self.engine, self.ranks, keys)
        for rank in self.ranks:
            rank.blocks.clear()

    def stored(self) -> set[bytes]:
        """Keys that the pool serves, after a check of the contents of their slots."""
        blocks = self.engine.blocks(limit=1000).blocks
        keys = [bytes.fromhex(block.key) for block in blocks]
        for rank in self.ranks:
            assert [rank.slots.get(block.slot) for block in blocks] == keys
        return set(keys)

    def contents(self, request: FakeRequest, group: KVGroup = FULL) -> list[bytes | None]:
        """What the request's blocks hold on the first rank."""
        return [self.ranks[0].blocks.get(block.block_id) for block in request.tables[group.index]]

    @property
    def outcomes(self) -> dict[str, int]:
        """How many blocks that were offered came to which end."""
        return {outcome: count for outcome, count in self.engine.stats().stores.items() if count}

    @property
    def leases(self) -> int:
        return self.engine.stats().pool.leases

    # -- inside -----------------------------------------------------------------------------------------------

    def _submit(self, plan: PlannedStep) -> None:
        for rank in self.ranks:
            rank.submit(*plan.stores.ops, *plan.loads.ops, *plan.layered.ops)

    def _prefix(self, request: FakeRequest, group: KVGroup, local: int, end: int) -> list[Block]:
        """Blocks of the tokens up to `end`: none out of the window, cached ones below `local`, then fresh ones."""
        first, hashes = group.first_block(end), gpu_hashes(request.tokens, group)
        table = [self.pool.null_block] * first
        for number in range(first, local // group.block_tokens):
            block = self.pool.cached(hashes[number])
            assert block is not None, f"block {number} is not on the GPU"
            self.pool.touch([block])
            table.append(block)
        return table + self.pool.take(-(-end // group.block_tokens) - len(table))

    def _allocate(self, request: FakeRequest, end: int) -> tuple[list[int], ...]:
        """Free what has left the window, and give blocks up to the token `end`; ids of the new ones."""
        new = []
        for group, table in zip(self.groups.groups, request.tables, strict=True):
            self._leave_window(table, group.first_block(request.num_computed_tokens))
            blocks = self.pool.take(max(0, -(-end // group.block_tokens) - len(table)))
            table += blocks
            new.append([block.block_id for block in blocks])
            hashes = gpu_hashes(request.tokens, group)[: end // group.block_tokens]
            for block, block_hash in zip(table, hashes, strict=False):
                if not block.is_null and block.block_hash is None:
                    block.block_hash = block_hash
        return tuple(new)

    def _leave_window(self, table: list[Block], first: int) -> None:
        for number in range(min(first, len(table))):
            self.pool.free_blocks([block for block in [table[number]] if not block.is_null])
            table[number] = self.pool.null_block

    def _compute(self, request: FakeRequest, count: int) -> None:
        begin, end = request.num_computed_tokens, request.num_computed_tokens + count
        for group, table in zip(self.groups.groups, request.tables, strict=True):
            keys = keys_of(request.tokens, group)
            for number in range(begin // group.block_tokens, -(-end // group.block_tokens)):
                content = keys[number] if (number + 1) * group.block_tokens <= end else b"a part"
                for rank in self.ranks:
                    rank.blocks[table[number].block_id] = content
        request.num_computed_tokens = end

    def _free(self, request: FakeRequest) -> None:
        for table in request.tables:
            self.pool.free_blocks(reversed([block for block in table if not block.is_null]))
        request.tables = [[] for _ in self.groups.groups]
