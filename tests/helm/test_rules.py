"""Each alert fires when it should and only then, and has a runbook."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm" / "kvstow" / "files" / "rules.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"

ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}

POD = {"namespace": "ml", "pod": "vllm-0", "instance": "10.0.0.7:9595"}
OTHER = {"namespace": "ml", "pod": "vllm-1", "instance": "10.0.0.8:9595"}
WHERE = "ml/vllm-0 (10.0.0.7:9595)"
POOL = {**POD, "pool": "llama-0a1b2c", "model": "org/llama"}
SECOND = {**POD, "pool": "qwen-5d6e7f", "model": "org/qwen"}
"""Another pool of the same node."""
OF_POOL = f"pool llama-0a1b2c of {WHERE}"


@dataclass(frozen=True)
class Case:
    """`series`: values minute by minute, in promtool's notation, by name and labels. `fires`: labels (beside the
    severity) and summary of the one alert that fires at `minute`; none fires where it is None. `resolves`: a minute at
    which it does not fire any more."""

    alert: str
    minute: int
    series: tuple[tuple[str, dict[str, str], str], ...]
    fires: tuple[dict[str, str], str] | None = None
    resolves: int | None = None

    def __str__(self) -> str:
        how = "quiet" if self.fires is None else "fires" if self.resolves is None else "resolves"
        return f"{self.alert}-{how}"

    def promtool(self) -> dict[str, Any]:
        rule = ALERTS[self.alert]
        alerts = []
        if self.fires:
            labels, summary = self.fires
            annotations = {**rule["annotations"], "summary": summary}
            alerts = [{"exp_labels": {**rule["labels"], **labels}, "exp_annotations": annotations}]
        expected = {self.minute: alerts} if self.resolves is None else {self.minute: alerts, self.resolves: []}
        return {
            "interval": "1m",
            "input_series": [{"series": series(name, labels), "values": said} for name, labels, said in self.series],
            "alert_rule_test": [
                {"alertname": self.alert, "eval_time": f"{minute}m", "exp_alerts": firing}
                for minute, firing in expected.items()
            ],
        }


def series(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def cases() -> Iterator[Case]:
    yield from admin_down()
    yield from expiring()
    yield from not_pinned()
    yield from starving()
    yield from orphaned()
    yield from keeperless()
    yield from not_ready()
    yield from failing()
    yield from stuck()
    yield from lost()
    yield from rejected()
    yield from errors()
    yield from saturated()
    yield from dropped()
    yield from collapsed()
    yield from thrashing()
    yield from switched_off()
    yield from tier_down()
    yield from tier_loses_time()
    yield from tier_corrupts()
    yield from unbalanced()


def admin_down() -> Iterator[Case]:
    name, job = "KvstowAdminDown", {**POD, "job": "kv"}
    alive = ("kvstow_ready", OTHER, "1x60")
    gone = ("kvstow_ready", POD, "1x10 stale")
    down = ("up", job, "1x10 0x50")
    fires = (job, "No metrics of KVStow in ml/vllm-0 at 10.0.0.7:9595.")
    yield Case(name, 20, (alive, gone, down), fires)
    back = ("kvstow_ready", POD, "1x10 stale 1x60"), ("up", job, "1x10 0x20 1x40")
    yield Case(name, 20, (alive, *back), fires, resolves=45)
    yield Case(name, 20, (), ({}, "No metrics of KVStow."))
    yield Case(name, 12, (alive, gone, down))
    yield Case(name, 20, (alive, gone, ("up", job, "1x10 stale")))  # a pod that was deleted
    yield Case(name, 20, (alive, ("up", {**job, "job": "another"}, "0x60")))


def expiring() -> Iterator[Case]:
    name, key, week = "KvstowCertificateExpires", "kvstow_tls_certificate_expiry_timestamp_seconds", 7 * 86400
    # promtool's clock starts on 1 January 1970; here it is 0:20.
    fires = (POD, f"The certificate of {WHERE} expires in 6d 23h 40m 0s.")
    yield Case(name, 20, ((key, POD, f"{week}x30"),), fires)
    yield Case(name, 20, ((key, POD, f"{week}x30 {9 * week}x30"),), fires, resolves=45)
    yield Case(name, 20, ((key, POD, f"{week + 1200}x30"),))
    yield Case(name, 20, ((key, POD, f"{week}x10 {9 * week}x20"),))  # it was renewed in time


def not_pinned() -> Iterator[Case]:
    name, rank = "KvstowPoolNotPinned", {**POOL, "rank": "1"}

    def progress(values: str) -> tuple[tuple[str, dict[str, str], str], ...]:
        return ("kvstow_pin_progress_ratio", {**SECOND, "rank": "1"}, "1x60"), (
            "kvstow_pin_progress_ratio",
            rank,
            values,
        )

    fires = (rank, f"Pinning has stopped at 50% on rank 1, {OF_POOL}.")
    yield Case(name, 15, progress("0.5x60"), fires)
    yield Case(name, 15, progress("0.5x20 1x40"), fires, resolves=30)
    yield Case(name, 5, progress("0.5x60"))
    yield Case(name, 15, progress("0+0.01x60"))
    yield Case(name, 15, progress("1x60"))
    yield Case(name, 40, progress("0+0.01x20 0.2x40"), (rank, f"Pinning has stopped at 20% on rank 1, {OF_POOL}."))


def starving() -> Iterator[Case]:
    name, gib = "KvstowPoolStarves", 1 << 30

    def pool(granted: str, due: str, attached: str) -> tuple[tuple[str, dict[str, str], str], ...]:
        return (
            ("kvstow_pool_granted_bytes", POOL, granted),
            ("kvstow_pool_due_bytes", POOL, due),
            ("kvstow_sessions", {**POOL, "state": "attached"}, attached),
            ("kvstow_sessions", {**POOL, "state": "lost"}, "1x60"),
            ("kvstow_pool_granted_bytes", SECOND, f"{9 * gib}x60"),
            ("kvstow_pool_due_bytes", SECOND, f"{9 * gib}x60"),
            ("kvstow_sessions", {**SECOND, "state": "attached"}, "1x60"),
        )

    summary = f"Pool llama-0a1b2c of {WHERE} has 1GiB of memory, less than half of its fair share."
    yield Case(name, 15, pool(f"{gib}x60", f"{4 * gib}x60", "1x60"), (POOL, summary))
    yield Case(name, 15, pool(f"{gib}x20 {4 * gib}x40", f"{4 * gib}x60", "1x60"), (POOL, summary), resolves=30)
    yield Case(name, 15, pool(f"{3 * gib}x60", f"{4 * gib}x60", "1x60"))  # a row less
    yield Case(name, 15, pool(f"{gib}x7 {4 * gib}x60", f"{4 * gib}x60", "1x60"))  # it waited for some minutes
    yield Case(name, 15, pool("0x60", "0x60", "1x60"))
    yield Case(name, 15, pool(f"{gib}x60", f"{4 * gib}x60", "0x60"))  # nobody uses it


def orphaned() -> Iterator[Case]:
    name, key = "KvstowOrphanedMemory", "kvstow_node_orphaned_bytes"
    summary = f"2GiB of memory of an earlier service are still taken beside {WHERE}."
    yield Case(name, 30, ((key, POD, f"{2 << 30}x60"),), (POD, summary))
    yield Case(name, 30, ((key, POD, f"{2 << 30}x35 0x30"),), (POD, summary), resolves=45)
    yield Case(name, 30, ((key, POD, f"{2 << 30}x18 0x60"),))  # engines have handed it back
    yield Case(name, 30, ((key, POD, "0x60"),))


def keeperless() -> Iterator[Case]:
    name, up, restarts = "KvstowKeeperGone", "kvstow_node_keeper_up", "kvstow_node_keeper_restarts_total"
    fires = (POD, f"The keeper of {WHERE} is gone, or ends again and again.")
    yield Case(name, 10, ((up, POD, "0x60"), (restarts, POD, "0x60")), fires)
    yield Case(name, 10, ((up, POD, "0x15 1x50"), (restarts, POD, "0x15 1x50")), fires, resolves=30)
    yield Case(name, 40, ((up, POD, "1x60"), (restarts, POD, "0+1x60")), fires)
    yield Case(name, 40, ((up, POD, "1x10 0x2 1x50"), (restarts, POD, "0x12 1x50")))  # it was replaced
    yield Case(name, 40, (("kvstow_ready", POD, "1x60"),))  # there is to be none


def not_ready() -> Iterator[Case]:
    name, rank = "KvstowRankNotReady", {**POOL, "rank": "1"}
    summary = f"Rank 1, {OF_POOL} does not report, or cannot pin or copy."
    other = ("kvstow_rank_ready", {**SECOND, "rank": "1"}, "1x20")
    yield Case(name, 10, (other, ("kvstow_rank_ready", rank, "0x20")), (rank, summary))
    yield Case(name, 10, (other, ("kvstow_rank_ready", rank, "0x12 1x20")), (rank, summary), resolves=20)
    yield Case(name, 10, (other, ("kvstow_rank_ready", rank, "1x8 0x10")))  # a restart that is short enough
    yield Case(name, 10, (other, ("kvstow_rank_ready", rank, "1x20")))


def failing() -> Iterator[Case]:
    name, check = "KvstowNotReady", {**POD, "check": "ticker"}
    red = ("kvstow_health_check", {**check, "probe": "readyz"}, "0x20")
    fires = (check, f"The check ticker of {WHERE} has failed for five minutes.")
    yield Case(name, 10, (red,), fires)
    yield Case(name, 10, (("kvstow_health_check", {**check, "probe": "readyz"}, "0x12 1x20"),), fires, resolves=20)
    yield Case(name, 10, (("kvstow_health_check", {**check, "probe": "readyz"}, "0x4 1x20"),))
    yield Case(name, 10, (red, ("kvstow_state", {**POD, "state": "draining"}, "1x20")))  # another alert's, as is:
    yield Case(name, 10, (red, ("kvstow_errors_total", {**POD, "component": "engine", "code": "integrity"}, "1x20")))
    for other in ("ranks", "pinned"):
        yield Case(name, 10, (("kvstow_health_check", {**POD, "check": other, "probe": "readyz"}, "0x20"),))


def sessions(state: str, values: str) -> tuple[tuple[str, dict[str, str], str], ...]:
    """Engines of a pool in this state; all others are attached."""
    attached = (("kvstow_sessions", {**pool, "state": "attached"}, "3x60") for pool in (POOL, SECOND))
    well = ("kvstow_sessions", {**SECOND, "state": state}, "0x60")
    return *attached, well, ("kvstow_sessions", {**POOL, "state": state}, values)


def stuck() -> Iterator[Case]:
    name = "KvstowSessionStuck"
    fires = (POOL, f"Engines that are stuck, {OF_POOL}: 2.")
    yield Case(name, 5, sessions("stuck", "2x10"), fires)
    yield Case(name, 5, sessions("stuck", "2x10 0x20"), fires, resolves=15)
    yield Case(name, 5, sessions("stuck", "0x10"))
    yield Case(name, 5, sessions("lost", "2x10"))


def lost() -> Iterator[Case]:
    name = "KvstowSessionLost"
    fires = (POOL, f"Engines that are gone and have left processes behind, {OF_POOL}: 1.")
    yield Case(name, 20, sessions("lost", "1x30"), fires)
    yield Case(name, 20, sessions("lost", "1x25 0x30"), fires, resolves=40)
    yield Case(name, 20, sessions("lost", "0x8 1x5 0x30"))  # its processes have ended
    yield Case(name, 20, sessions("lost", "0x30"))
    yield Case(name, 20, sessions("stuck", "1x30"))


def rejected() -> Iterator[Case]:
    name, key = "KvstowSessionRejected", "kvstow_rejected_connections_total"
    version, other = {**POD, "reason": "version"}, (key, {**POD, "reason": "identity"}, "7x60")
    fires = (version, f"{WHERE} rejects engines (version), 20 times within 10 minutes.")
    yield Case(name, 40, (other, (key, version, "0+2x60")), fires)
    yield Case(name, 40, (other, (key, version, "0+2x45 90x40")), fires, resolves=60)
    yield Case(name, 40, (other, (key, version, "0x20 5x40")))  # once, as at a restart
    yield Case(name, 40, (other, (key, version, "5x60")))


def errors() -> Iterator[Case]:
    name, load = "KvstowTransferErrors", {**POOL, "direction": "load"}
    failed, well = {**load, "result": "error"}, {**load, "result": "ok"}
    fires = (load, f"11 transfers (load) of {OF_POOL} failed within 10 minutes.")
    yield Case(name, 10, (("kvstow_transfers_total", failed, "0x5 11x20"),), fires)
    yield Case(name, 10, (("kvstow_transfers_total", failed, "0x5 11x60"),), fires, resolves=20)
    yield Case(name, 40, (("kvstow_transfers_total", failed, "0x5 11x60"),))  # over half an hour ago
    yield Case(name, 10, (("kvstow_transfers_total", failed, "0x20"), ("kvstow_transfers_total", well, "0+99x20")))


def saturated() -> Iterator[Case]:
    name = "KvstowQueueSaturated"

    def waits(direction: str, short: str, long: str) -> tuple[tuple[str, dict[str, str], str], ...]:
        labels = {**POOL, "direction": direction}
        counts = {"1.0": short, "3.0": long, "+Inf": long}
        return tuple(("kvstow_transfer_queue_wait_seconds_bucket", {**labels, "le": le}, n) for le, n in counts.items())

    summary = f"One load in ten of {OF_POOL} waits in the queue for 2.6s or longer."
    yield Case(name, 30, waits("load", "0+60x60", "0+120x60"), (POOL, summary))
    quick = waits("load", "0+60x40 2400+120x60", "0+120x40 4800+120x60")
    yield Case(name, 30, quick, (POOL, summary), resolves=60)
    yield Case(name, 30, waits("load", "0+110x60", "0+120x60"))
    yield Case(name, 30, waits("load", "0x60", "0x60"))
    yield Case(name, 30, waits("store", "0+60x60", "0+120x60"))


def dropped() -> Iterator[Case]:
    name, key = "KvstowStoreDropsHigh", "kvstow_store_blocks_total"
    stored = (key, {**POOL, "outcome": "stored"}, "0+80x60")
    summary = f"Pool llama-0a1b2c of {WHERE} drops 20% of the blocks offered to it: all slots are in use."
    yield Case(name, 30, (stored, (key, {**POOL, "outcome": "dropped_cpu_full"}, "0+20x60")), (POOL, summary))
    few = (key, {**POOL, "outcome": "dropped_cpu_full"}, "0+20x40 800x40")
    yield Case(name, 30, (stored, few), (POOL, summary), resolves=60)
    yield Case(name, 30, (stored, (key, {**POOL, "outcome": "dropped_cpu_full"}, "0+2x60")))
    yield Case(name, 30, (stored, (key, {**POOL, "outcome": "skipped_already_cached"}, "0+900x60")))


def collapsed() -> Iterator[Case]:
    name = "KvstowHitRatioCollapsed"
    day = 26 * 60
    asked = ("kvstow_query_tokens_total", POOL, f"0+100x{2 * day}")
    hits = {**POOL, "source": "host"}
    # In promtool's notation, a+bxn continues from a.
    fell = ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}+15x{day}")
    summary = f"The hit ratio of {OF_POOL} has fallen to 15%, less than half of the day before."
    yield Case(name, day + 50, (asked, fell), (POOL, summary))
    rose = ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}+15x60 {60 * day + 900}+60x{day}")
    yield Case(name, day + 50, (asked, rose), (POOL, summary), resolves=day + 90)
    yield Case(name, day + 50, (asked, ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}+40x{day}")))
    night = ("kvstow_query_tokens_total", POOL, f"0+100x{day} {100 * day}+10x{day}")
    yield Case(name, day + 50, (night, ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}+1x{day}")))
    idle = ("kvstow_query_tokens_total", POOL, f"0+100x{day} {100 * day}x{day}")
    yield Case(name, day + 50, (idle, ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}x{day}")))
    few = ("kvstow_hit_tokens_total", hits, f"0+5x{day} {5 * day}x{day}")
    yield Case(name, day + 50, (asked, few))  # it was not worth much before


def thrashing() -> Iterator[Case]:
    name = "KvstowThrashing"
    usable = ("kvstow_pool_usable_blocks", POOL, "1000x60")
    evicted = ("kvstow_evicted_blocks_total", {**POOL, "reason": "capacity"}, "0+150x60")
    loads = {**POOL, "direction": "load"}
    summary = f"Pool llama-0a1b2c of {WHERE} evicted 1.5k blocks in 10 minutes, more than it has slots, and loaded few."
    yield Case(name, 45, (usable, evicted, ("kvstow_transfer_blocks_total", loads, "0+5x60")), (POOL, summary))
    larger = ("kvstow_pool_usable_blocks", POOL, "1000x50 9000x40")
    ever = ("kvstow_evicted_blocks_total", {**POOL, "reason": "capacity"}, "0+150x99")
    loaded = ("kvstow_transfer_blocks_total", loads, "0+5x99")
    yield Case(name, 45, (larger, ever, loaded), (POOL, summary), resolves=60)
    yield Case(name, 45, (usable, evicted, ("kvstow_transfer_blocks_total", loads, "0+100x60")))
    large = ("kvstow_pool_usable_blocks", POOL, "9000x60")
    yield Case(name, 45, (large, evicted, ("kvstow_transfer_blocks_total", loads, "0x60")))
    purged = ("kvstow_evicted_blocks_total", {**POOL, "reason": "purge"}, "0+150x60")
    few = ("kvstow_evicted_blocks_total", {**POOL, "reason": "capacity"}, "0+1x60")
    yield Case(name, 45, (usable, purged, few, ("kvstow_transfer_blocks_total", loads, "0x60")))


def switched_off() -> Iterator[Case]:
    name, lookups, stores = "KvstowSwitchedOff", "kvstow_fallbacks_total", "kvstow_store_blocks_total"
    bypassed = {**POD, "reason": "bypassed"}
    fires = (POD, f"The cache of {WHERE} has been switched off, fully or partly, for an hour.")
    yield Case(name, 100, ((lookups, bypassed, "0+5x120"),), fires)
    yield Case(name, 100, ((lookups, bypassed, "0+5x110 550x60"),), fires, resolves=130)
    yield Case(name, 100, ((stores, {**POD, "outcome": "skipped_bypass"}, "0+5x120"),), fires)
    yield Case(name, 100, (("kvstow_state", {**POD, "state": "draining"}, "1x120"),), fires)  # and nothing comes
    yield Case(name, 40, ((lookups, bypassed, "0+5x30 150x90"),))  # for half an hour
    yield Case(name, 100, ((lookups, {**POD, "reason": "not_ready"}, "0+5x120"),))  # another alert's
    yield Case(name, 100, ((stores, {**POD, "outcome": "skipped_already_cached"}, "0+5x120"),))


TIER = {**POOL, "tier": "mooncake"}


def tier_down() -> Iterator[Case]:
    name, opened = "KvstowTierDown", "kvstow_tier_breaker_open"
    well = (opened, {**TIER, **SECOND}, "0x60")
    fires = (TIER, f"The fleet tier (mooncake) of {OF_POOL} gives no answers.")
    yield Case(name, 10, (well, (opened, TIER, "1x60")), fires)
    yield Case(name, 10, (well, (opened, TIER, "1x12 0x40")), fires, resolves=20)
    yield Case(name, 4, (well, (opened, TIER, "1x60")))
    yield Case(name, 10, (well, (opened, TIER, "1x3 0 1x20")), fires)
    yield Case(name, 10, (well, (opened, TIER, "1x6 0x20")))  # the store is back
    yield Case(name, 10, (well, (opened, TIER, "1x4 stale")))  # it is gone


def tier_loses_time() -> Iterator[Case]:
    name, waited, saved = "KvstowTierLosesTime", "kvstow_tier_wait_seconds_total", "kvstow_tier_saved_seconds_total"
    gains = ((waited, {**TIER, **SECOND}, "0+2x99"), (saved, {**TIER, **SECOND}, "0+9x99"))

    def pool(waits: str, saves: str) -> tuple[tuple[str, dict[str, str], str], ...]:
        return (*gains, (waited, TIER, waits), (saved, TIER, saves))

    within = "within 30 minutes, longer than computing would have taken."
    summary = f"Requests of {OF_POOL} waited 1m 0s for the fleet tier (mooncake) {within}"
    yield Case(name, 60, pool("0+2x99", "0+1x99"), (TIER, summary))
    yield Case(name, 60, pool("0+2x65 130x60", "0+1x65 65x60"), (TIER, summary), resolves=105)
    yield Case(name, 60, pool("0+2x99", "0x99"), (TIER, summary))
    yield Case(name, 60, pool("0+1x99", "0+2x99"))
    yield Case(name, 60, pool("0+0.2x99", "0x99"))  # a few probes
    yield Case(name, 60, pool("0+2x20 42x79", "0+1x20 22x79"))  # since then requests wait for nothing


def tier_corrupts() -> Iterator[Case]:
    name, key = "KvstowTierCorruptObjects", "kvstow_tier_corrupt_objects_total"
    well = (key, {**TIER, **SECOND}, "0x60")
    summary = f"3 objects of the fleet tier (mooncake) that {OF_POOL} fetched within 15 minutes were not what was put."
    yield Case(name, 20, (well, (key, TIER, "0x10 3x50")), (TIER, summary), resolves=30)
    yield Case(name, 40, (well, (key, TIER, "0x10 3x50")))  # over a quarter of an hour ago
    yield Case(name, 20, (well, (key, TIER, "0x60")))


def unbalanced() -> Iterator[Case]:
    name, key = "KvstowIntegrityCheckFailed", "kvstow_errors_total"
    labels = {**POD, "component": "engine"}
    summary = f"The integrity check of {WHERE} has failed."
    yield Case(name, 5, ((key, {**labels, "code": "integrity"}, "1x9"),), (POD, summary))
    yield Case(name, 5, ((key, {**labels, "code": "integrity"}, "1x9 0x20"),), (POD, summary), resolves=20)  # restarted
    yield Case(
        name, 5, ((key, {**labels, "code": "integrity"}, "0x9"), (key, {**labels, "code": "load_failed"}, "1x9"))
    )


CASES = tuple(cases())


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case}" for number, case in enumerate(CASES)])
def test_an_alert_fires_when_it_should_and_only_then(case: Case, promtool: Path, tmp_path: Path) -> None:
    file = tmp_path / "test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case.promtool()]})
    )
    result = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_is_tried_both_ways() -> None:
    tried = {(case.alert, case.fires is not None) for case in CASES}
    assert tried == {(alert, fires) for alert in ALERTS for fires in (True, False)}


def test_each_alert_is_tried_until_it_resolves() -> None:
    assert {case.alert for case in CASES if case.resolves is not None} == set(ALERTS)


def test_the_rules_are_rules(promtool: Path) -> None:
    result = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"


def test_each_alert_has_its_runbook_and_each_runbook_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_runbook_has_its_four_parts(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    headings = re.findall(r"^#+ .*", text, re.MULTILINE)
    assert headings == [f"# {alert}", "## What it means", "## Confirm", "## Do", "## Do not"]
