"""Commands against a node with no pool, one, and three."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.api.fakenode import MODEL, FakeNode
from tests.doubles.fakes import FakeClock
from tests.service.cli.terminal import Terminal

from kvstow.status import MemoryStatus
from kvstow.tier.blockstore import Purged
from kvstow_api.app import create_app
from kvstow_api.host import ApiHost
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress

NAMES = ["a-000001", "b-000002", "c-000003"]
KEYS = [b"\x00\x00" + bytes([number]) * 4 for number in range(4)]

OneOf = Callable[..., Any]


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(FakeClock(100.0))


@pytest.fixture
def url(node: FakeNode, tmp_path: Path) -> Iterator[str]:
    """The address of a server of `node`."""
    with ExitStack() as stack:
        listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
        stack.callback(listeners.close)
        listeners.listen_unix(tmp_path / "admin.sock")
        app = create_app(ApiHost(directory=node, version="1.2.3", mode="node", addresses=listeners.addresses))
        server = AdminServer(app, listeners.sockets, pytest.fail)
        server.start()
        stack.callback(server.stop)
        yield listeners.url


@pytest.fixture
def ask(url: str, run: Any) -> OneOf:
    """Runs a command against that server."""
    return lambda *arguments, **given: run(*arguments, "--server", url, **given)


OF_ONE_POOL = [
    ["get", "blocks"],
    ["describe", "block", KEYS[0].hex()],
    ["get", "contexts"],
    ["config", "set", "policy=lru", "--yes"],
    ["pinning", "pause"],
    ["pinning", "resume"],
    ["pinning", "retry"],
    ["evict", "--slots", "1", "--yes"],
    ["purge", "--all", "--yes"],
]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_pool_is_named_where_there_are_several(ask: OneOf, node: FakeNode, count: int) -> None:
    for name in NAMES[:count]:
        node.attach(name).store(KEYS)
    code, words = {
        0: (5, "no engine has attached yet, so there is no pool"),
        1: (0, ""),
        3: (2, f"give --pool: {', '.join(NAMES)}"),
    }[count]
    for arguments in OF_ONE_POOL:
        outcome = ask(*arguments)
        assert (outcome.exit_code, words in outcome.stderr) == (code, True), (arguments, outcome.output)
        if count == 3:
            assert ask(*arguments, "--pool", NAMES[1]).exit_code == 0, arguments
        assert ask(*arguments, "--pool", "unknown").exit_code == 4, arguments


def test_a_change_is_of_the_named_pool_alone(ask: OneOf, node: FakeNode) -> None:
    for name in NAMES:
        node.attach(name).store(KEYS)
    assert "removed 4 blocks" in ask("purge", "--all", "--yes", "--pool", NAMES[1]).stdout
    cached = {name: pool.index.num_cached for name, pool in node.shared.items()}
    assert cached == {NAMES[0]: 4, NAMES[1]: 0, NAMES[2]: 4}


OF_THE_NODE = [
    ["get", "pools"],
    ["get", "sessions"],
    ["get", "namespaces"],
    ["get", "operations"],
    ["describe", "server"],
    ["doctor"],
    ["top"],
    ["wait", "--timeout", "0"],
    ["wait", "--for", "pinned", "--timeout", "0"],
    ["events", "--limit", "1", "--recent", "10"],
]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_is_of_the_whole_node_needs_no_pool(ask: OneOf, node: FakeNode, count: int) -> None:
    for name in NAMES[:count]:
        node.attach(name).store(KEYS)
    outcomes = {" ".join(arguments): ask(*arguments) for arguments in OF_THE_NODE}
    assert {words: said.output for words, said in outcomes.items() if said.exit_code} == {}


@pytest.mark.parametrize("noun", ["ranks", "transfers"])
def test_lists_are_those_of_all_pools_or_of_one_engine(ask: OneOf, node: FakeNode, noun: str) -> None:
    for name in NAMES:
        node.attach(name).begin_store(KEYS[:1])

    def sessions(*options: str) -> set[str]:
        outcome = ask("get", noun, *options, "-o", "json")
        assert outcome.exit_code == 0, outcome.output
        return {one["session"] for one in json.loads(outcome.stdout)["items"]}

    assert sessions() == {"s1", "s2", "s3"}
    assert sessions("--pool", NAMES[1]) == {"s2"}
    assert sessions("--session", "s3") == {"s3"}
    words = ask("get", noun, "-o", "wide").stdout
    assert all(name in words for name in (*NAMES, "s1", "s2", "s3"))


def test_blocks_of_one_namespace_are_listed(ask: OneOf, node: FakeNode) -> None:
    engine = node.attach(NAMES[0])
    engine.store(KEYS[:1])
    namespace = engine.control.reset()
    engine.store(KEYS[1:2])
    assert ask("get", "blocks", "-o", "name").stdout.split() == [KEYS[0].hex(), KEYS[1].hex()]
    assert ask("get", "blocks", "--namespace", namespace, "-o", "name").stdout.split() == [KEYS[1].hex()]


def test_a_rank_is_described_by_its_engine(ask: OneOf, node: FakeNode) -> None:
    for _ in range(2):
        node.attach(NAMES[0])
    outcome = ask("describe", "rank", "1")
    assert (outcome.exit_code, "s1, s2" in outcome.stderr) == (5, True)
    assert "cuda:1" in ask("describe", "rank", "1", "--session", "s2").stdout


def test_what_is_about_one_pool_names_the_pools(ask: OneOf, node: FakeNode) -> None:
    for name in NAMES:
        node.attach(name)
    outcome = ask("describe", "stats")
    assert outcome.exit_code == 2
    assert ", ".join(NAMES) in outcome.stderr
    assert ask("describe", "stats", "--pool", NAMES[2]).exit_code == 0


def test_sessions_and_namespaces_are_listed_and_described(ask: OneOf, node: FakeNode) -> None:
    node.sharing_off = ("its keys are not reproducible",)
    node.attach(NAMES[0]).store(KEYS)
    header, line = ask("get", "sessions").stdout.splitlines()
    shown = dict(zip(re.split("  +", header), re.split("  +", line), strict=True))
    wanted = {"SESSION": "s1", "ENGINE": "fake", "STATE": "attached", "MODEL": MODEL, "POOL": NAMES[0], "PID": "1000"}
    assert shown.items() >= wanted.items()
    (session,) = json.loads(ask("get", "sessions", "-o", "json").stdout)["items"]
    assert (session["ranks"][1]["pid"], session["ranks"][1]["pinned_slots"]) == (1002, 16)
    assert ask("get", "session", "-o", "name").stdout == "s1\n"
    assert "quarantined slots" in ask("describe", "session", "s1").stdout
    assert ask("describe", "session", "s9").exit_code == 4
    assert "no: its keys are not reproducible" in ask("get", "namespaces").stdout
    assert "snapshot" in ask("describe", "namespace", f"{NAMES[0]}-keys").stdout
    assert ask("describe", "namespace", "unknown").exit_code == 4


@pytest.mark.parametrize("kill", [False, True])
def test_an_engine_is_detached_after_a_confirmation(ask: OneOf, node: FakeNode, kill: bool) -> None:
    node.attach(NAMES[0]).begin_store(KEYS)
    flags = ["--kill"] if kill else []
    refused = ask("detach", "s1", *flags)
    assert refused.exit_code == 2
    assert "this would detach session s1 (fake, pool a-000001)" in refused.stderr
    assert ("kill its processes" in refused.stderr) == kill
    planned = ask("detach", "s1", *flags, "--dry-run")
    assert "1 transfer in flight" in planned.stdout
    assert node.detached == []
    done = ask("detach", "s1", *flags, "--yes")
    assert done.exit_code == 0
    assert ("its processes are killed" in done.stdout) == kill
    assert node.detached == [("s1", kill)]
    assert node.engines[0].control.is_lost


def test_who_is_not_there_cannot_be_detached(ask: OneOf) -> None:
    outcome = ask("detach", "s1", "--yes")
    assert outcome.exit_code == 4
    assert "`kvstow get sessions` lists them" in outcome.stderr


def test_a_pool_without_sessions_is_deleted_after_a_confirmation(ask: OneOf, node: FakeNode) -> None:
    engine = node.attach(NAMES[0])
    engine.store(KEYS)
    used = ask("delete", "pool", NAMES[0], "--yes")
    assert used.exit_code == 5
    assert f"1 session uses pool {NAMES[0]}" in used.stderr
    node.end(engine)
    assert ask("delete", "pool", NAMES[0]).exit_code == 2
    assert ask("delete", "pool", NAMES[0], "--dry-run").stdout == f"would delete pool {NAMES[0]} and 4 blocks\n"
    assert list(node.shared) == [NAMES[0]]
    node.purged = Purged(40, "disk /a is failed")
    deleted = ask("delete", "pool", NAMES[0], "--yes").stdout
    assert deleted == f"deleted pool {NAMES[0]}, and 40 blocks in the store; disk /a is failed\n"
    assert list(node.shared) == []
    assert ask("delete", "pool", NAMES[0], "--yes").exit_code == 4


def test_a_drain_is_of_the_node_or_of_one_pool(ask: OneOf, node: FakeNode) -> None:
    for name in NAMES:
        node.attach(name)
    assert ask("drain", "--pool", NAMES[0], "--yes").exit_code == 0
    assert [pool.admin.drain_status.active for pool in node.shared.values()] == [True, False, False]
    assert ask("undrain", "--pool", NAMES[0]).exit_code == 0
    assert ask("drain").exit_code == 2, "it makes /readyz fail"
    assert ask("drain", "--yes").exit_code == 0
    assert all(pool.admin.drain_status.active for pool in node.shared.values())
    assert ask("undrain").exit_code == 0
    assert ask("bypass", "--load", "--pool", NAMES[1]).exit_code == 0
    assert [pool.admin.bypass.load for pool in node.shared.values()] == [False, True, False]


def test_the_size_is_the_servers_to_set(ask: OneOf, node: FakeNode) -> None:
    node.attach(NAMES[0])
    outcome = ask("resize", "--slots", "4", "--yes")
    assert outcome.exit_code == 5
    assert f"the host sets the size of pool {NAMES[0]}: change --memory of the service" in outcome.stderr


def test_waiting_for_pinned_is_waiting_for_the_nodes_memory(ask: OneOf, node: FakeNode) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20)
    outcome = ask("wait", "--for", "pinned", "--timeout", "0")
    assert outcome.exit_code == 3
    assert "1 MiB of 4 MiB of memory are populated" in outcome.stderr
    assert ask("wait", "--timeout", "0").exit_code == 0, "a node is ready before it is populated"


def test_waiting_on_a_terminal_shows_a_bar_until_the_memory_is_populated(
    url: str, node: FakeNode, child_environ: dict[str, str]
) -> None:
    node.memory_status = MemoryStatus(4 << 20, 1 << 20, populate_bytes_per_second=float(1 << 20))
    with Terminal("wait", "--for", "pinned", "--server", url, environ=child_environ) as terminal:
        terminal.until("1 MiB of 4 MiB of memory are populated, 1 MiB/s, about 3 s left")
        terminal.until("━━━")
        node.memory_status = MemoryStatus(4 << 20, 4 << 20)
        assert terminal.end() == 0


def test_top_of_a_pool_shows_its_engines_alone(ask: OneOf, node: FakeNode) -> None:
    for name in NAMES:
        node.attach(name).store(KEYS)
    everything = ask("top").stdout
    assert all(name in everything for name in (*NAMES, "s1", "s2", "s3"))
    assert "hit ratio" not in everything
    one = ask("top", "--pool", NAMES[1]).stdout
    assert f"▸ {NAMES[1]}" in one
    assert "hit ratio" in one
    assert "s2" in one
    assert not any(session in one for session in ("s1", "s3"))
    assert ask("top", "--pool", "unknown").exit_code == 4


def test_top_says_what_is_wrong_with_an_engine_and_how_to_end_it(ask: OneOf, node: FakeNode) -> None:
    for _ in range(60):
        node.attach(NAMES[0])
    node.engines[40].begin_store(KEYS)
    node.engines[40].control.lose("its connection has ended")
    lines = ask("top").stdout.splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("s41 "))
    assert "lost" in lines[row]
    assert "kvstow detach s41 --kill" in " ".join(lines[:row])
    assert any(line.startswith("and ") and line.endswith(" more sessions") for line in lines)
    assert len(lines) <= 60
