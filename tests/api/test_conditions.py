"""The conditions: each with evidence that causes it, and with evidence that does not."""

from __future__ import annotations

import ast
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.conftest import send_report

from kvstow.attach.calls import Report
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import DesiredState
from kvstow.stats import EngineState, SlotCounts
from kvstow.status import BypassStatus, DrainStatus, RankStatus, Readiness, SessionStatus
from kvstow_api.answers import DoctorView, PoolCurveView
from kvstow_api.conditions import hosts, pools
from kvstow_api.conditions.evidence import TABLE, Evidence
from kvstow_api.conditions.hosts import find_lost
from kvstow_api.conditions.pools import find_silent_ranks
from kvstow_api.conditions.table import failures_of, find_conditions
from kvstow_api.directory import HostMemory
from kvstow_api.figures import Sample
from kvstow_api.hostsettings import CertificateState
from kvstow_api.hostwatch import Measured, RankClocks
from kvstow_api.openapi import EXAMPLES

GIB = 1 << 30
HOST = HostMemory(headroom_bytes=64 * GIB, limit="64 GiB are left", reserve_bytes=64 << 20, huge_pages="madvise")
RANK = RankStatus(
    rank=0,
    boot_id="b",
    state="ready",
    slot_bytes=GIB,
    pinned_slots=8,
    target_slots=8,
    pinned_bytes=8 * GIB,
    target_bytes=8 * GIB,
    pin_rate_bytes_per_second=0.0,
    pin_elapsed_seconds=1.0,
    pin_mode="cuda",
    locked_bytes=8 * GIB,
    resident_bytes=8 * GIB,
    chunks_done=8,
    chunks_total=8,
    chunks_failed=0,
    error_reason=None,
    error=None,
    notice=None,
    pending_ops=0,
    queued_stores=0,
    queued_loads=0,
    uncollected_completions=0,
    store_bytes_total=2 * GIB,
    load_bytes_total=2 * GIB,
    store_busy_seconds=0.1,
    load_busy_seconds=0.1,
    pin_failures={},
    numa_bytes={},
    layer_way="kernel",
    layer_kernel_bytes_per_second=0.8 * 54e9,
    layer_engine_bytes_per_second=54e9,
    last_report_age_seconds=0.1,
    session=EXAMPLES["SessionStatus"]["id"],
)
DAY = 86_400


def host(**changes: Any) -> Measured:
    return Measured(HOST._replace(**changes))


LARGER = msgspec.convert(EXAMPLES["PoolCurveView"], PoolCurveView)
"""A curve on which twice the size would be worth its memory."""
FITS = replace(LARGER, next_useful=None)
SESSION = replace(msgspec.convert(EXAMPLES["SessionStatus"], SessionStatus), state="attached", registered_slots=8)
EMBEDDED = {one.name for one in TABLE if one.of in ("host", "pool")}


def sample(minutes: float, *, evicted: int = 0, hit: int = 0, slots: SlotCounts | None = None, **stores: int) -> Sample:
    stats = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8)).stats()
    stats.pool = replace(stats.pool, usable_slots=8, slots=slots or stats.pool.slots)
    stats.lookups.hit_blocks, stats.evictions["capacity"] = hit, evicted
    stats.stores.update(stores)
    return Sample(60 * minutes, stats)


def lately(**stores: int) -> list[Sample]:
    """What was stored within the last seconds, while six slots were leased and two were being filled."""
    return [sample(0), sample(0.1, slots=SlotCounts(0, 2, 0, 6, 0), **stores)]


def evidence(*ranks: RankStatus, **changes: Any) -> Evidence:
    given = ranks or (RANK, replace(RANK, rank=1))
    healthy = Evidence(
        readiness=Readiness("ready", "", 8, 8, given),
        desired=DesiredState("e", 8, number=1),
        drain=DrainStatus(False, None, None, False, 0, 0),
        bypass=BypassStatus(load=False, store=False, ttl_seconds_left=None),
        sessions=[SESSION],
        kept=[sample(0), sample(5, evicted=7)],
        clock_offsets={0: 0.5, 1: -1.0},
        measured=host(),
        certificate_seconds_left=7 * DAY,
        exposed_files={},
        curve=FITS,
    )
    return healthy._replace(**changes)


def both(given: Evidence) -> tuple[Evidence, list[Evidence]]:
    """Of an embedded engine: its host and its pool."""
    pool = given._replace(
        pool="host",
        drain=DrainStatus(False, None, None, False, 0, 0),
        bypass=BypassStatus(load=False, store=False, ttl_seconds_left=None),
    )
    return given._replace(desired=None, kept=(), recent=()), [pool]


def diagnose(given: Evidence) -> DoctorView:
    return find_conditions(*both(given))


def with_readiness(usable: int, *ranks: RankStatus, state: EngineState = "pinning", **changes: Any) -> Evidence:
    return evidence(readiness=Readiness(state, "for a reason", usable, 8, ranks or (RANK,)), **changes)


def test_a_healthy_engine_has_no_conditions() -> None:
    told = diagnose(evidence())
    assert told.conditions == []
    assert told.healthy
    assert (set(told.checked), told.skipped) == (EMBEDDED, {})
    assert failures_of(*both(evidence())) == {}


FIRING = [
    ("process", "error", evidence(failures={"of the host": "it burns"})),
    ("process", "error", evidence(failures={"ticker": "the thread has ended"})),
    ("engine_failed", "error", evidence(integrity_error="a slot is in two states")),
    ("engine_failed", "error", with_readiness(8, state="degraded")),
    ("engine_failed", "error", with_readiness(8, state="stopped")),
    ("rank_silent", "error", evidence(RANK, replace(RANK, rank=1, last_report_age_seconds=None))),
    ("rank_silent", "error", evidence(RANK, replace(RANK, rank=1, last_report_age_seconds=5.1, pid=7, host="n"))),
    ("rank_failed", "error", evidence(RANK, replace(RANK, rank=1, state="failed", error="no more"))),
    ("session_stuck", "error", evidence(sessions=[replace(SESSION, state="stuck", oldest_seconds=45.0)])),
    ("giving_back", "info", evidence(replace(RANK, resident_bytes=15 * GIB))),
    ("no_slots", "warning", with_readiness(0)),
    ("no_slots", "info", with_readiness(0, starting={SESSION.id})),
    ("growing", "info", with_readiness(4)),
    ("growing", "warning", with_readiness(4, recent=[sample(0), sample(0.1, evicted=3)])),
    ("stores_dropped", "warning", evidence(recent=lately(stored=1, dropped_cpu_full=2))),
    ("stores_dropped", "warning", evidence(recent=lately(dropped_not_ready=2))),
    ("stores_dropped", "warning", evidence(recent=lately(failed=2))),
    ("certificate", "warning", evidence(certificate_seconds_left=7 * DAY - 1)),
    ("certificate", "error", evidence(certificate_seconds_left=0)),
    ("certificate", "warning", evidence(certificate_seconds_left=90 * DAY, certificate_is_outdated=True)),
    ("token_files", "warning", evidence(exposed_files={"token_file": "other users may read it (mode 0644)"})),
    ("token_unusable", "error", evidence(unusable_files={"token_file": "cannot be read: No such file or directory"})),
    ("pinning", "error", evidence(replace(RANK, error_reason="cgroup_limit", error="no memory", pinned_bytes=GIB))),
    ("pinning", "error", evidence(replace(RANK, error_reason="driver", chunks_failed=1))),
    ("pinning", "error", evidence(replace(RANK, error_reason="hugepages", chunks_failed=1))),
    ("memory_limit", "error", evidence(replace(RANK, pinned_bytes=0), measured=host(headroom_bytes=8 * GIB))),
    ("memory_limit", "warning", evidence(measured=host(headroom_bytes=(64 << 20) - 1))),
    ("huge_pages", "warning", evidence(measured=host(huge_pages="never"))),
    ("numa", "warning", evidence(replace(RANK, notice="the pool is not bound to NUMA node 1 of its device: no"))),
    ("memlock", "warning", evidence(replace(RANK, pin_mode="populate", notice="mlock failed; RLIMIT_MEMLOCK is 8"))),
    ("clocks", "warning", evidence(clock_offsets={0: 1.1})),
    ("clocks", "warning", evidence(clock_offsets={0: -30.0})),
    ("links", "warning", evidence(RANK, replace(RANK, rank=1, load_busy_seconds=0.21))),
    ("links", "warning", evidence(RANK, replace(RANK, rank=1, store_busy_seconds=0.21))),
    ("slow_kernel", "info", evidence(replace(RANK, layer_way="engine", layer_kernel_bytes_per_second=27e9))),
    ("thrashing", "warning", evidence(kept=[sample(0), sample(5, evicted=8)])),
    ("pool_size", "info", evidence(curve=LARGER)),
    ("pool_size", "info", evidence(curve=replace(FITS, enough=FITS.items[1]))),
    ("share", "warning", evidence(granted_bytes=2 * GIB - 1, due_bytes=4 * GIB)),
    ("bypass", "warning", evidence(bypass=BypassStatus(load=True, store=False, ttl_seconds_left=None))),
    ("bypass", "info", evidence(bypass=BypassStatus(load=False, store=True, ttl_seconds_left=5.0))),
    ("drain", "warning", evidence(drain=DrainStatus(True, "all", None, True, 0, 0))),
    ("pinning_paused", "info", evidence(desired=DesiredState("e", 8, number=1, paused=True))),
]


@pytest.mark.parametrize(("check", "severity", "given"), FIRING)
def test_a_condition_has_cause_reason_fix_and_evidence(check: str, severity: str, given: Evidence) -> None:
    told = diagnose(given)
    (one,) = told.conditions
    assert (one.name, one.severity) == (check, severity)
    assert told.healthy == (severity == "info")
    assert one.what
    assert one.why
    assert one.fix
    fails = next(condition.checks for condition in TABLE if condition.name == check)
    assert failures_of(*both(given)) == dict.fromkeys(fails, one.what)


SILENT = [
    ("share", evidence(granted_bytes=2 * GIB, due_bytes=4 * GIB)),
    ("pool_size", evidence(replace(RANK, pinned_bytes=7 * GIB), curve=LARGER)),
    ("rank_silent", evidence(replace(RANK, last_report_age_seconds=None), starting={SESSION.id})),
    ("rank_silent", evidence(replace(RANK, last_report_age_seconds=5.0))),
    ("engine_failed", with_readiness(8, state="draining")),
    ("stores_dropped", evidence(recent=lately(stored=3, skipped_bypass=9, dropped_draining=2, dropped_purged=1))),
    ("stores_dropped", evidence(recent=[sample(0, dropped_cpu_full=7), sample(0.1, dropped_cpu_full=7)])),
    ("no_slots", with_readiness(0, sessions=[])),
    ("memory_limit", evidence(replace(RANK, pinned_bytes=0), measured=host(headroom_bytes=8 * GIB + (64 << 20)))),
    ("memory_limit", evidence(measured=host(headroom_bytes=64 << 20))),
    ("huge_pages", evidence(measured=host(huge_pages="always"))),
    ("huge_pages", evidence(measured=host(huge_pages="reserved"))),
    ("numa", evidence(replace(RANK, notice="something else"))),
    ("memlock", evidence(replace(RANK, pin_mode="populate"))),  # nobody asked for a lock
    ("memlock", evidence(replace(RANK, pin_mode="cuda", locked_bytes=0))),  # the driver needs none
    ("links", evidence(RANK, replace(RANK, rank=1, load_busy_seconds=0.19))),
    ("links", evidence(RANK, replace(RANK, rank=1, load_busy_seconds=9.0, load_bytes_total=GIB - 1))),
    ("slow_kernel", evidence(replace(RANK, layer_engine_bytes_per_second=None, layer_kernel_bytes_per_second=1e9))),
    ("thrashing", evidence(kept=[sample(0), sample(5, evicted=20, hit=2)])),
    ("thrashing", evidence(kept=[sample(0, evicted=8), sample(5, evicted=15)])),
]


@pytest.mark.parametrize(("check", "given"), SILENT)
def test_healthy_evidence_has_no_conditions(check: str, given: Evidence) -> None:
    assert check in EMBEDDED
    assert diagnose(given).conditions == []


@pytest.mark.parametrize(("huge_pages", "cure"), [("reserved", "vm.nr_hugepages"), ("madvise", "memory limit of the")])
def test_the_fix_for_too_little_memory_fits_the_kind_of_memory(huge_pages: str, cure: str) -> None:
    short = host(headroom_bytes=GIB, huge_pages=huge_pages)
    (one,) = diagnose(evidence(replace(RANK, pinned_bytes=0), measured=short)).conditions
    assert cure in one.fix


def test_one_refusal_is_one_condition() -> None:
    short = host(headroom_bytes=GIB)
    refused = replace(RANK, state="degraded", error_reason="cgroup_limit", error="no memory", pinned_bytes=GIB)
    told = diagnose(with_readiness(8, refused, state="degraded", measured=short))
    assert [one.name for one in told.conditions] == ["pinning"]


def test_a_condition_says_whom_it_concerns() -> None:
    silent = replace(RANK, rank=3, last_report_age_seconds=12.0, pool="host", session="s1")
    (one,) = diagnose(evidence(silent)).conditions
    assert (one.pool, one.session, one.rank) == ("host", "s1", 3)
    assert one.what == "rank 3 has been silent for 12 s"


def test_stores_are_dropped_for_a_reason() -> None:
    (one,) = diagnose(evidence(recent=lately(stored=1, dropped_cpu_full=2))).conditions
    assert one.what == (
        "2 of 3 blocks were not stored in the last seconds: every slot is in use "
        "(6 leased by requests that wait for their loads, 2 being filled)"
    )
    assert "kvstow get transfers" in one.fix


def test_a_pool_that_grows_says_what_that_costs() -> None:
    (one,) = diagnose(with_readiness(4, recent=[sample(0), sample(0.1, evicted=3)])).conditions
    assert one.what == "the pool is still growing: 4 of 8 slots, and 3 blocks were evicted or dropped meanwhile"
    paused = with_readiness(4, desired=DesiredState("e", 8, number=1, paused=True))
    assert {one.name: one.fix for one in diagnose(paused).conditions}["growing"] == "`kvstow pinning resume`"


def test_checks_without_evidence_are_skipped_with_a_reason() -> None:
    unknown = replace(RANK, boot_id=None, state="starting", pinned_bytes=0, target_bytes=0, resident_bytes=0)
    told = diagnose(
        evidence(
            unknown,
            kept=[],
            clock_offsets={},
            measured=Measured(),
            certificate_seconds_left=None,
            exposed_files=None,
            curve=replace(FITS, items=[], advice="nothing can be said yet"),
        )
    )
    named = {
        "certificate",
        "token_unusable",
        "memory_limit",
        "huge_pages",
        "numa",
        "memlock",
        "clocks",
        "links",
        "slow_kernel",
        "thrashing",
        "token_files",
        "pool_size",
    }
    assert set(told.skipped) == named
    assert all(told.skipped.values())
    assert set(told.checked) | set(told.skipped) == EMBEDDED
    assert told.conditions == []


def test_a_size_that_would_help_comes_with_the_command_that_sets_it() -> None:
    (one,) = diagnose(evidence(curve=LARGER)).conditions
    assert one.what == LARGER.advice
    assert "`kvstow resize 16GiB`" in one.fix, "of each rank, as the command takes it"
    assert (one.evidence["better_ratio"], one.evidence["requests"]) == (0.34, 2600)


def test_the_worst_comes_first() -> None:
    given = evidence(
        replace(RANK, error_reason="driver"),
        desired=DesiredState("e", 8, number=1, paused=True),
        clock_offsets={0: 9.0},
    )
    assert [one.severity for one in diagnose(given).conditions] == ["error", "warning", "info"]


def test_a_silent_rank_in_a_process_that_is_known_to_be_stopped_has_the_command_that_mends_it() -> None:
    silent = replace(RANK, pid=7, host="node", session=SESSION.id, last_report_age_seconds=9.0)
    (one,) = find_silent_ranks(evidence(silent, sessions=[replace(SESSION, pid=7, process="stopped")]))
    assert one.fix.startswith("`kill -CONT 7` on node")
    (one,) = find_silent_ranks(evidence(silent, sessions=[replace(SESSION, pid=7, process="unknown")]))
    assert one.fix.startswith("look at the process: `ps -o stat,wchan -p 7`")


def test_processes_of_a_lost_session_that_serve_again_are_not_to_be_ended() -> None:
    lost = replace(SESSION, id="s1", state="lost", host="node", processes=1, ranks=(replace(RANK, pid=7),))
    (one,) = find_lost(evidence(is_node=True, sessions=[lost]))
    assert one.what.endswith("(its workers were the processes 7 on node)")
    assert "`ps -o pid,stat,wchan -p 7` on node" in one.fix
    assert "`kvstow detach s1 --kill`" in one.fix
    (one,) = find_lost(evidence(is_node=True, sessions=[replace(lost, ranks=())]))
    assert "`kvstow detach s1 --kill` ends them, unless their engine has attached again" in one.fix
    again = replace(SESSION, id="s2", ranks=(replace(RANK, pid=7),))
    (one,) = find_lost(evidence(is_node=True, sessions=[lost, again]))
    assert one.fix == "nothing: these processes have attached again as session s2, and release it by themselves"


def test_clocks_are_compared_when_ranks_send_their_time() -> None:
    clocks = RankClocks(now=lambda: 100.0)
    for rank, sent in ((0, 103.5), (5, 90.0)):
        clocks.note(rank, sent)
    assert clocks.offsets() == {0: 3.5, 5: -10.0}


@pytest.mark.anyio
async def test_the_route_gathers_the_evidence(launch: Any, ranks: Any) -> None:
    hosts = {
        "host_memory": lambda: HOST._replace(huge_pages="never"),
        "certificate": lambda: CertificateState(time.time() + DAY),
    }
    client: httpx.AsyncClient = await launch(**hosts)
    await send_report(client, Report(ranks.make_report(0), clock=0.0).pack())
    ranks.engine.admin.set_bypass(load=True, store=False, ttl_seconds=None)
    body = (await client.get("/v1/doctor")).json()
    assert {one["name"] for one in body["conditions"]} == {"certificate", "huge_pages", "clocks", "bypass"}
    assert set(body["skipped"]) == {"links", "slow_kernel", "thrashing", "token_files", "token_unusable", "pool_size"}


@pytest.mark.anyio
async def test_a_token_file_that_was_emptied_is_told_while_nobody_comes_with_a_token(
    launch: Any, ranks: Any, token_file: Path
) -> None:
    client = await launch(token_file=token_file)
    token_file.write_text("")
    await launch.state.watch.look()
    found = {one["name"]: one for one in (await client.get("/v1/doctor")).json()["conditions"]}
    assert found["token_unusable"]["what"] == (
        "token_file cannot be used: the file must have 1 to 100 lines with one token each"
    )
    assert str(token_file) not in str(found), "every reader sees it"
    token_file.write_text("admin-token")
    await launch.state.watch.look()
    assert "token_unusable" not in {one["name"] for one in (await client.get("/v1/doctor")).json()["conditions"]}


def test_no_condition_says_to_end_what_may_be_healthy_or_to_restart_what_loses_the_cache() -> None:
    """In the whole table, also where no evidence above leads to: the texts of a fault are read under stress."""
    risky = re.compile(r"\bend the process|\bend processes|\brestart (the|its|your) (service|rank|ranks|process)\b")
    weighed = re.compile(r"when its requests have ended|must not be used|keeps its cache|when it can lose its cache")
    for module in (hosts, pools):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and risky.search(node.value):
                assert weighed.search(node.value), node.value
