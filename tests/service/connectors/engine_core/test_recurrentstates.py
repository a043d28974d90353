"""States of recurrent layers: stored one step after vLLM has handed them over, and referenced until then."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from tests.service.connectors.engine_core.vllmhost import (
    FULL,
    Cached,
    FakeRequest,
    Output,
    VllmHost,
    gpu_hashes,
    keys_of,
)

from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups

STATE = KVGroup(1, 4, 2, is_state=True)
GROUPS = KVGroups((FULL, STATE), 4)
PROMPT = "abcdefghi"


@dataclass
class OutputWithStates(Output):
    """A step of vLLM 0.30, with (group, block, tokens) of the states that it computes, by request."""

    states: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)

    @property
    def kv_connector_block_state(self) -> SimpleNamespace | None:
        return SimpleNamespace(boundary_state_offloads=self.states)


class StateHost(VllmHost):
    """Block 20 holds the state after 8 tokens of `PROMPT`, cached and free."""

    def __init__(self, prompt: str = PROMPT) -> None:
        super().__init__(GROUPS)
        self.request = FakeRequest("r", prompt)
        self.ask(self.request)
        self.state = self.pool.blocks[20]
        self.state.block_hash = gpu_hashes(PROMPT, STATE)[1]

    def plan(self, *states: tuple[int, int, int], preempted: str = "", ended: str = "") -> list[tuple[int, ...]]:
        """Blocks of the stores of a step that hands these states over."""
        output = OutputWithStates({}, Cached(), {"r": list(states)}, {ended}, preempted_req_ids={preempted})
        return [op.blocks for op in self.side.plan_step(output).stores.ops]


def test_a_state_is_stored_one_step_after_it_was_handed_over() -> None:
    host = StateHost()
    assert host.plan((1, 20, 8)) == []
    assert host.state.ref_cnt == 1
    assert host.side.has_pending_stores
    assert host.side.holds_gpu_blocks
    assert host.plan() == [(20,)]
    assert host.state.ref_cnt == 1  # the store's own
    host.ranks[0].send(1, "done")
    assert [block.key for block in host.engine.blocks().blocks] == [keys_of(PROMPT, STATE)[1].hex()]


def test_a_state_of_a_request_that_lets_nothing_be_stored_is_left_out() -> None:
    host = StateHost("another prompt")
    unstored = FakeRequest("unstored", PROMPT)
    unstored.kv_transfer_params = {"kvstow": {"store": False}}
    host.ask(unstored)
    host.side.admit(unstored, [[1, 2, 3, 4, 5], [20]], 0)
    assert host.plan((1, 20, 8)) == []
    assert host.state.ref_cnt == 0
    assert host.plan() == []


def test_a_state_that_is_refused_is_offered_again() -> None:
    host = StateHost()
    host.engine.admin.drain("stop_stores", None)
    host.plan((1, 20, 8))
    assert host.plan() == []
    assert host.state.ref_cnt == 0
    host.engine.admin.undrain()
    assert host.side.has_pending_stores
    assert host.plan() == [(20,)]


def test_a_state_that_this_step_computes_is_not_read() -> None:
    """Its block waits to be offered again, with what it held before."""
    host = StateHost()
    host.engine.admin.drain("stop_stores", None)
    host.plan((1, 20, 8))
    host.plan()
    host.engine.admin.undrain()
    assert host.plan((1, 20, 8)) == []
    assert host.plan() == [(20,)]


def test_a_state_is_free_when_it_was_read() -> None:
    host = StateHost()
    host.plan((1, 20, 8))
    host.plan()
    host.ranks[0].send(1, "source_free")
    host.side.settle()
    assert host.state.ref_cnt == 0


def test_states_of_requests_that_are_gone_are_left_alone() -> None:
    host = StateHost()
    for gone in ({"preempted": "r"}, {"ended": "r"}):
        host.plan((1, 20, 8), **gone)
        assert host.state.ref_cnt == 0
    assert host.plan() == []


def test_null_blocks_and_blocks_that_are_not_cached_are_left_alone() -> None:
    host = StateHost()
    host.plan((1, 0, 8), (1, 21, 8))
    assert host.pool.blocks[21].ref_cnt == 0
    assert host.plan() == []


def test_a_state_that_vllm_has_evicted_meanwhile_is_not_stored() -> None:
    for other in (None, b"another state...." + bytes(4)):
        host = StateHost()
        host.plan((1, 20, 8))
        host.state.block_hash = other
        assert host.plan() == []
        assert host.state.ref_cnt == 0


def test_a_reset_forgets_waiting_states() -> None:
    host = StateHost()
    host.plan((1, 20, 8))
    assert host.side.reset()
    assert host.state.ref_cnt == 0
    assert host.plan() == []


def test_after_a_failure_waiting_states_are_free() -> None:
    host = StateHost()
    host.plan((1, 20, 8))
    host.side.release_gpu_blocks()
    assert host.state.ref_cnt == 0
    assert not host.side.holds_gpu_blocks


def test_no_state_is_taken_before_the_length_of_hashes_is_known() -> None:
    host = StateHost(prompt="a")
    host.plan((1, 20, 8))
    assert host.state.ref_cnt == 0
    assert host.plan() == []


def test_a_state_at_the_end_of_a_prefix_is_all_that_is_loaded_of_its_group() -> None:
    host, request = StateHost(), FakeRequest("q", PROMPT)
    host.store(*keys_of(PROMPT), keys_of(PROMPT, STATE)[1])
    assert host.ask(request) == 8
    host.side.admit(request, [[1, 2, 3, 4, 5], [0, 6, 7]], 8)
    plan = host.side.plan_step(OutputWithStates({}))
    assert [op.blocks for op in plan.loads.ops] == [(1, 2, 3, 4, 6)]


def test_a_prefix_whose_state_is_missing_ends_at_the_state_before() -> None:
    host, request = StateHost(), FakeRequest("q", PROMPT)
    host.store(*keys_of(PROMPT), keys_of(PROMPT, STATE)[0])
    assert host.ask(request) == 4
