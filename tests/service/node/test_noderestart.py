"""A node is killed, and the next one has its memory, its index and its sessions, which engines still use."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.service.node import rawengine
from tests.service.node.conftest import EngineProcess
from tests.service.node.keepers import end_keeper, kinds_held, look, lose_at_the_keeper
from tests.service.node.noderunner import EXTENT_BYTES, RunningNode
from tests.service.node.rawengine import RawEngine, key_of
from tests.service.node.restartclient import RestartEngine
from tests.waiting import eventually

from kvstow.attach.calls import Hold
from kvstow.control.hazards import EVERY
from kvstow.errors import KeeperError
from kvstow_service.node.survival.orphanedmemory import find_orphaned_memory

pytestmark = pytest.mark.process

KEYS = [key_of(number) for number in range(40)]

StartNode = Callable[..., RunningNode]
Attach = Callable[..., RawEngine]


@pytest.fixture
def state(tmp_path: Path, stack: ExitStack) -> Path:
    stack.callback(end_keeper, tmp_path / "state")
    return tmp_path / "state"


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "node" / "attach.sock"


@pytest.fixture
def start_node(socket: Path, state: Path, child_environ: dict[str, str], stack: ExitStack) -> StartNode:
    def start(extents: int = 8, *words: str) -> RunningNode:
        node = RunningNode(socket, state, child_environ, extents, *words)
        stack.callback(node.close)
        return node

    return start


@pytest.fixture
def attach(socket: Path, stack: ExitStack) -> Attach:
    return lambda *settled_tokens: stack.enter_context(closing(RawEngine(socket, settled_tokens=settled_tokens)))


def found(engine: RawEngine, keys: Sequence[bytes]) -> int:
    """How many leading keys there are."""
    return engine.lookup(keys, Hold.NOTHING).leading


def has_loaded(engine: RawEngine, keys: Sequence[bytes]) -> bool:
    return engine.load(keys) == len(keys)


def pool_of(shown: dict[str, Any]) -> dict[str, Any]:
    (pool,) = shown["pools"].values()
    found: dict[str, Any] = pool
    return found


def num_blocks(shown: dict[str, Any]) -> int:
    return sum(pool["blocks"] for pool in shown["pools"].values())


def test_what_was_learned_of_blocks_and_traffic_outlives_the_service(start_node: StartNode, attach: Attach) -> None:
    node = start_node()
    engine = attach()
    engine.store_until_found(KEYS)
    for _ in range(2 * EVERY):
        engine.use(KEYS[:10])
    engine.wait_for(lambda: pool_of(node.tick())["returns"] > EVERY)
    engine.wait_for(lambda: engine.load(KEYS) == len(KEYS))  # answered after all uses were handled, and recorded
    assert pool_of(node.show())["used"] == 10
    returns = pool_of(node.show())["returns"]
    node.kill()
    again = pool_of(start_node().first)
    assert (again["blocks"], again["used"]) == (len(KEYS), 10)
    assert again["returns"] == pytest.approx(returns, rel=0.05), "what the last few requests have taught is lost"


def test_what_a_session_was_writing_waits_until_it_has_spoken(start_node: StartNode, attach: Attach) -> None:
    node = start_node()
    engine = attach()
    engine.store_until_found(KEYS)
    begun = engine.begin_store([key_of(1000), key_of(1001)])
    assert len(begun.slots) == 2
    node.kill()
    again = start_node()
    assert (pool_of(again.first)["quarantined"], pool_of(again.first)["is_waiting"]) == (2, True)
    assert [state for state, _ in again.first["sessions"].values()] == ["lost"]
    other = attach()  # of the same process, but it says nothing of the session before
    other.wait_for(lambda: other.load(KEYS) == len(KEYS))
    assert pool_of(again.show())["quarantined"] == 2
    engine = attach(engine.welcome.token)
    engine.wait_for(lambda: "lost" not in [state for state, _ in again.show()["sessions"].values()])
    assert (pool_of(again.show())["quarantined"], pool_of(again.show())["is_waiting"]) == (0, False)
    engine.store_all([key_of(1000), key_of(1001)])
    assert engine.load([key_of(1000), key_of(1001)]) == 2


@pytest.mark.parametrize("when", ["in the gap", "afterwards"])
def test_what_a_session_was_writing_waits_until_its_processes_are_dead(
    start_node: StartNode,
    engine_process: EngineProcess,
    socket: Path,
    when: str,
) -> None:
    node = start_node()
    engine = engine_process(socket, 20)
    node.kill()
    if when == "in the gap":
        engine.kill()
        engine.wait()
    again = start_node()
    assert pool_of(again.first)["blocks"] == 20
    if when == "afterwards":
        assert pool_of(again.first)["quarantined"] == 1
        assert pool_of(again.first)["is_waiting"]
        engine.kill()
    eventually(lambda: again.show()["sessions"] == {})
    pool = pool_of(again.show())
    assert (pool["blocks"], pool["quarantined"], pool["is_waiting"]) == (20, 0, False)


def test_nothing_is_evicted_while_an_engine_of_before_may_read_it(
    start_node: StartNode, engine_process: EngineProcess, socket: Path, attach: Attach
) -> None:
    node = start_node(2)
    num_slots = EXTENT_BYTES // rawengine.SLOT_BYTES  # of one extent for each of two ranks
    reader = engine_process(socket, num_slots - 1)
    node.kill()
    again = start_node(2)
    engine = attach()
    engine.wait_for(lambda: found(engine, KEYS) == num_slots - 1)
    assert engine.load(KEYS) == num_slots // 2, "no session leases more"
    begun = engine.begin_store([key_of(5000)])
    assert (begun.op_id, dict(begun.outcomes)) == (0, {"dropped_cpu_full": 1})
    reader.kill()
    eventually(lambda: not pool_of(again.show())["is_waiting"])
    engine.store_all([key_of(5000), key_of(5001)])
    assert engine.load([key_of(5000), key_of(5001)]) == 2


def test_a_pool_has_its_share_until_its_engines_have_come_back_or_died(
    start_node: StartNode, engine_process: EngineProcess, socket: Path, attach: Attach
) -> None:
    """Otherwise an engine of another pool that attaches first would take all its memory."""
    node = start_node()
    gone, stays = engine_process(socket, 20), attach()
    stays.wait_for(lambda: found(stays, KEYS) == 20)
    node.kill()
    again = start_node()
    share = again.first["shares"]
    assert share[stays.welcome.pool] >= 2 * EXTENT_BYTES, "the rows that it uses"
    gone.kill()
    stays = attach(stays.welcome.token)
    stays.wait_for(lambda: "lost" not in [state for state, _ in again.show()["sessions"].values()])
    assert again.show()["shares"].keys() == share.keys()
    stays.close()
    eventually(lambda: again.show()["shares"] == {})


def test_killed_again_and_again(start_node: StartNode, attach: Attach) -> None:
    tokens: tuple[str, ...] = ()
    descriptors = list[int]()
    for number in range(4):
        node = start_node()
        if number > 1:  # each service has as many as the one before, but for files that it reads in this moment
            eventually(lambda node=node: node.show()["descriptors"] <= descriptors[1])
        descriptors.append(node.first["descriptors"])
        engine = attach(*tokens)
        engine.wait_for(partial(has_loaded, engine, KEYS[: 10 * number]))
        engine.store_until_found(KEYS[: 10 * (number + 1)])
        engine.begin_store([key_of(2000 + number)])
        tokens = (engine.welcome.token,)
        assert node.show()["allocated"] == 8 * EXTENT_BYTES
        node.kill()


def test_a_service_that_is_killed_while_an_engine_attaches_starts_again(
    start_node: StartNode, attach: Attach, socket: Path, state: Path
) -> None:
    """Its pool has a worker, and no memory before the other one has attached. The keeper has the worker first: killed
    before the roster has it too, the service comes back without that session."""
    node = start_node()
    engine = RawEngine(socket, ranks=1)
    eventually(lambda: kinds_held(state)["worker"] == 1, "the worker at the keeper")
    node.kill()
    for _ in range(2):
        again = start_node()
        assert [pool["blocks"] for pool in again.first["pools"].values()] in ([], [0])
        assert [kind for kind, _ in again.first["sessions"].values()] in ([], ["lost"])
        again.kill()
    again = start_node()
    attach(engine.welcome.token).store_until_found(KEYS)
    eventually(lambda: "lost" not in [kind for kind, _ in again.show()["sessions"].values()])
    engine.close()


def test_an_engine_with_the_longest_name_costs_no_keeper(start_node: StartNode, socket: Path, state: Path) -> None:
    node = start_node()
    engine = RawEngine(socket, replace(rawengine.HELLO, engine="ü" * 255))
    engine.store_until_found(KEYS)
    assert kinds_held(state)["worker"] == 2
    assert node.show()["problems"] == []
    node.kill()
    again = start_node()
    assert pool_of(again.first)["blocks"] == len(KEYS)
    assert len(again.first["sessions"]) == 1
    engine.close()


@pytest.fixture
def real_engine(socket: Path, child_environ: dict[str, str], stack: ExitStack) -> Callable[[], RestartEngine]:
    def start() -> RestartEngine:
        engine = RestartEngine(socket, child_environ)
        stack.callback(engine.kill)
        return engine

    return start


def test_memory_that_nobody_knows_of_counts_until_engines_have_let_go_of_it(
    start_node: StartNode, real_engine: Callable[[], RestartEngine], state: Path
) -> None:
    node = start_node()
    engine = real_engine()
    eventually(lambda: engine.show()["loads"] > 20)
    node.kill()
    lose_at_the_keeper(state, "roster")
    again = start_node()
    assert (num_blocks(again.first), again.first["allocated"]) == (0, 8 * EXTENT_BYTES)
    assert again.first["given_up"], "the engine maps it"
    again.kill()
    again = start_node()  # it is given up still
    assert again.first["allocated"] == 8 * EXTENT_BYTES
    before = engine.show()["loads"]
    eventually(lambda: engine.show()["loads"] > before + 20)
    eventually(lambda: not again.show()["given_up"], "the end of the earlier memory")
    assert again.show()["allocated"] == 8 * EXTENT_BYTES
    assert not engine.has_memory_besides(again.process.pid)


def test_a_service_that_stops_has_its_memory_back(
    start_node: StartNode, real_engine: Callable[[], RestartEngine], state: Path
) -> None:
    node = start_node()
    engine = real_engine()
    eventually(lambda: engine.show()["loads"] > 20)
    assert node.stop() == 0
    with pytest.raises(KeeperError):
        look(state)
    eventually(lambda: not engine.has_memory_besides())


def test_no_service_comes_within_the_timeout_of_the_keeper(state: Path, start_node: StartNode) -> None:
    node = start_node(8, "timeout=0.5")
    keeper = look(state).pid
    pidfd = os.pidfd_open(keeper)
    node.kill()
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    assert not any(one.pid == keeper for one in find_orphaned_memory(()))
    assert start_node().first["pools"] == {}


# -- the matrix of docs/node.md -----------------------------------------------------------------------------

KEEPER_LABELS = {
    "has lost the memory of some rows": ("extent-3",),
    "has lost the index of a pool, or the pidfd of a worker that lives": ("journal", "worker"),
}


def matrix() -> Iterator[Any]:
    """What happens to the keeper, how the service ends, and what the documentation says of the cache. Ends by SIGTERM
    differ little, so most of them are left to `make soak`."""
    text = (Path(__file__).parents[3] / "docs" / "node.md").read_text()
    head, _, *rows = text[text.index("| the keeper | ") :].partition("\n\n")[0].splitlines()
    _, *ends = (cell.strip() for cell in head.strip("|").split("|"))
    for row in rows:
        keeper, *outcomes = (cell.strip() for cell in row.strip("|").split("|"))
        for end, outcome in zip(ends, outcomes, strict=True):
            is_rare = "killed" not in end and keeper != "lives"
            yield pytest.param(keeper, end, outcome, marks=pytest.mark.soak if is_rare else ())


@pytest.mark.parametrize(("keeper", "end", "outcome"), list(matrix()))
def test_each_cell_of_the_matrix_in_the_documentation(
    start_node: StartNode,
    engine_process: EngineProcess,
    socket: Path,
    attach: Attach,
    state: Path,
    keeper: str,
    end: str,
    outcome: str,
) -> None:
    node = start_node(8, *["keep"] * ("keep" in end))
    engine_process(socket, len(KEYS))
    pid = look(state).pid
    match keeper:
        case "was killed earlier, and another one has come":
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: kinds_held(state)["roster"], "another keeper")
        case "stopped answering before that, so that the service went on without it":
            os.kill(pid, signal.SIGSTOP)
            attach()
            eventually(lambda: "there is no keeper" in str(node.show()["problems"]))

    if "killed" in end:
        node.kill()
    else:
        assert node.stop() == 0

    with suppress(ProcessLookupError):
        match keeper:
            case "is killed with the service":
                os.kill(pid, signal.SIGKILL)
            case "does not answer when the next service starts":
                os.kill(pid, signal.SIGSTOP)
            case "stopped answering before that, so that the service went on without it":
                os.kill(pid, signal.SIGCONT)
    for label in KEEPER_LABELS.get(keeper, ()) if end != "SIGTERM" else ():
        lose_at_the_keeper(state, next(one for one in look(state).labels if one.startswith(label)))
    try:
        again = start_node()
        expected = {"stays": [len(KEYS)], "empty": [0], "the rows below stay": range(1, len(KEYS))}
        assert num_blocks(again.first) in expected[outcome]
        assert again.first["faults"] == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
