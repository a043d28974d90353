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
from tests.helm.conftest import ROOT

from kvstow_api.conditions.evidence import TABLE

pytestmark = pytest.mark.deploy

RULES = ROOT / "helm" / "kvstow" / "files" / "rules.yaml"

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
    yield from tokenless()
    yield from keeperless()
    yield from not_ready()
    yield from failing()
    yield from stuck()
    yield from lost()
    yield from user_at_limit()
    yield from rejected()
    yield from errors()
    yield from saturated()
    yield from dropped()
    yield from collapsed()
    yield from thrashing()
    yield from switched_off()
    yield from tier_down()
    yield from disks()
    yield from tier_loses_time()
    yield from tier_corrupts()
    yield from unbalanced()


def lasting(
    alert: str, name: str, hold: int, summary: str, *, of_pool: bool = True, severity: str = "warning", value: int = 1
) -> Iterator[Case]:
    """An alert that fires once a condition has lasted for `hold` minutes. Other conditions, and the same one as a mere
    information, do not matter."""
    where = POOL if of_pool else {**POD, "pool": "", "model": ""}
    fires = (POOL if of_pool else POD, summary)

    def series_of(values: str, name: str = name, severity: str = severity) -> tuple[str, dict[str, str], str]:
        return ("kvstow_condition", {**where, "condition": name, "severity": severity}, values)

    other = series_of("1x200", "another")
    yield Case(alert, hold + 2, (other, series_of(f"{value}x200")), fires)
    yield Case(alert, hold + 2, (other, series_of(f"{value}x{hold + 4} stale")), fires, resolves=hold + 20)
    yield Case(alert, hold + 2, (other, series_of(f"{value}x{hold - 1} stale")))
    yield Case(alert, hold + 2, (other, series_of("1x200", severity="info")))


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
    how = "expires within seven days, has expired, or cannot be renewed with the files that are there"
    summary = f"The certificate of {WHERE} {how}."
    yield from lasting("KvstowCertificateExpires", "certificate", 15, summary, of_pool=False)


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
    summary = f"A pool of {WHERE} has waited for memory for ten minutes: see pool llama-0a1b2c."
    for name in ("share", "memory_wait", "memory_kept"):
        yield from lasting("KvstowPoolStarves", name, 10, summary)


def orphaned() -> Iterator[Case]:
    summary = f"Processes have memory that no running service has, beside {WHERE}."
    yield from lasting("KvstowOrphanedMemory", "orphaned_memory", 20, summary, of_pool=False)


def tokenless() -> Iterator[Case]:
    summary = f"A token file of {WHERE} cannot be used."
    yield from lasting("KvstowTokenUnusable", "token_unusable", 5, summary, of_pool=False)


def keeperless() -> Iterator[Case]:
    name, up, restarts = "KvstowKeeperGone", "kvstow_node_keeper_up", "kvstow_node_keeper_restarts_total"
    fires = (POD, f"The keeper of {WHERE} is gone, does not answer, or ends again and again.")
    yield Case(name, 10, ((up, POD, "0x60"), (restarts, POD, "0x60")), fires)
    yield Case(name, 10, ((up, POD, "0x15 1x50"), (restarts, POD, "0x15 1x50")), fires, resolves=30)
    yield Case(name, 40, ((up, POD, "1x60"), (restarts, POD, "0+1x60")), fires)
    yield Case(name, 40, ((up, POD, "1x10 0x2 1x50"), (restarts, POD, "0x12 1x50")))  # it was replaced
    yield Case(name, 40, (("kvstow_ready", POD, "1x60"),))  # there is to be none


def not_ready() -> Iterator[Case]:
    summary = f"Ranks that do not report or cannot copy, {OF_POOL}: 2."
    for name in ("rank_silent", "rank_failed"):
        yield from lasting("KvstowRankNotReady", name, 2, summary, severity="error", value=2)


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


def stuck() -> Iterator[Case]:
    summary = f"Engines that are stuck or stopped, {OF_POOL}: 2."
    for name in ("session_stuck", "session_stopped"):
        yield from lasting("KvstowSessionStuck", name, 1, summary, severity="error", value=2)


def lost() -> Iterator[Case]:
    summary = f"Engines that are gone and have left processes behind, {OF_POOL}: 1."
    yield from lasting("KvstowSessionLost", "session_lost", 15, summary)


def user_at_limit() -> Iterator[Case]:
    summary = f"Engines of one user have held as much of {WHERE} as one user may for 15 minutes."
    yield from lasting("KvstowUserAtLimit", "user_limit", 15, summary, of_pool=False)


def rejected() -> Iterator[Case]:
    name, key = "KvstowSessionRejected", "kvstow_rejected_connections_total"
    version, other = {**POD, "reason": "version"}, (key, {**POD, "reason": "identity"}, "7x60")
    fires = (version, f"{WHERE} has rejected engines within 10 minutes, for the reason version: 20.")
    yield Case(name, 40, (other, (key, version, "0+2x60")), fires)
    yield Case(name, 40, (other, (key, version, "0+2x45 90x40")), fires, resolves=60)
    yield Case(name, 40, (other, (key, version, "0x20 5x40")))  # once, as at a restart
    yield Case(name, 40, (other, (key, version, "5x60")))


def errors() -> Iterator[Case]:
    name, load = "KvstowTransferErrors", {**POOL, "direction": "load"}
    failed, well = {**load, "result": "error"}, {**load, "result": "ok"}
    fires = (load, f"Transfers (load) of {OF_POOL} that failed within 10 minutes: 11.")
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
    summary = f"Pool llama-0a1b2c of {WHERE} has not stored all blocks that were offered to it, for ten minutes."
    yield from lasting("KvstowStoreDropsHigh", "stores_dropped", 10, summary)


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
    summary = f"Pool llama-0a1b2c of {WHERE} evicts blocks before they are used again."
    yield from lasting("KvstowThrashing", "thrashing", 20, summary)


def switched_off() -> Iterator[Case]:
    summary = f"The cache of {WHERE} has been switched off, fully or partly, for an hour."
    for name in ("drain", "bypass", "pinning_paused"):
        yield from lasting("KvstowSwitchedOff", name, 60, summary, of_pool=False)


TIER = {**POOL, "tier": "mooncake"}


def tier_down() -> Iterator[Case]:
    summary = f"The store below {OF_POOL} does not work."
    for name in ("tier_down", "tier_client"):
        yield from lasting("KvstowTierDown", name, 5, summary)


def disks() -> Iterator[Case]:
    for alert, name, hold, summary in (
        ("KvstowDiskDown", "disk_ready", 5, f"A disk of {WHERE} does not work, or another process has its files."),
        ("KvstowDiskStuck", "disk_stuck", 1, f"An operation on a disk of {WHERE} hangs."),
        ("KvstowDiskWears", "disk_wear", 60, f"More than the capacity of a disk of {WHERE} is written to it in a day."),
        ("KvstowDiskCorrupt", "disk_corrupt", 1, f"Blocks on a disk of {WHERE} were not what was written there."),
    ):
        yield from lasting(alert, name, hold, summary, of_pool=False)


def tier_loses_time() -> Iterator[Case]:
    name, waited, saved = "KvstowTierLosesTime", "kvstow_tier_wait_seconds_total", "kvstow_tier_saved_seconds_total"
    gains = ((waited, {**TIER, **SECOND}, "0+2x99"), (saved, {**TIER, **SECOND}, "0+9x99"))

    def pool(waits: str, saves: str) -> tuple[tuple[str, dict[str, str], str], ...]:
        return (*gains, (waited, TIER, waits), (saved, TIER, saves))

    within = "within 30 minutes, longer than computing would have taken."
    summary = f"Requests of {OF_POOL} waited 1m 0s for the store (mooncake) {within}"
    yield Case(name, 60, pool("0+2x99", "0+1x99"), (TIER, summary))
    yield Case(name, 60, pool("0+2x65 130x60", "0+1x65 65x60"), (TIER, summary), resolves=105)
    yield Case(name, 60, pool("0+2x99", "0x99"), (TIER, summary))
    yield Case(name, 60, pool("0+1x99", "0+2x99"))
    yield Case(name, 60, pool("0+0.2x99", "0x99"))  # a few probes
    yield Case(name, 60, pool("0+2x20 42x79", "0+1x20 22x79"))  # since then requests wait for nothing


def tier_corrupts() -> Iterator[Case]:
    name, key = "KvstowTierCorruptObjects", "kvstow_tier_part_corrupt_blocks_total"
    part = {**POD, "tier": "disk", "part": "/mnt/nvme0"}
    well = (key, {**part, "part": "/mnt/nvme1"}, "0x60")
    summary = (
        f"Blocks that {WHERE} read from the store (disk, /mnt/nvme0) within 15 minutes and that were not what was "
        "written: 3."
    )
    yield Case(name, 20, (well, (key, part, "0x10 3x50")), (part, summary), resolves=30)
    yield Case(name, 40, (well, (key, part, "0x10 3x50")))  # over a quarter of an hour ago
    yield Case(name, 20, (well, (key, part, "0x60")))


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


def test_alerts_are_for_conditions_that_there_are() -> None:
    names = {
        name
        for one in ALERTS.values()
        for found in re.findall(r'condition=~"([^"]+)"', one["expr"])
        for name in found.split("|")
    }
    assert names <= {condition.name for condition in TABLE}
    assert names


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
