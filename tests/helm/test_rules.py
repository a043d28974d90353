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


@dataclass(frozen=True)
class Case:
    """`series`: values minute by minute, in promtool's notation, by name and labels. `fires`: labels (beside the
    severity) and summary of the one alert that fires at `minute`; none fires where it is None."""

    alert: str
    minute: int
    series: tuple[tuple[str, dict[str, str], str], ...]
    fires: tuple[dict[str, str], str] | None = None

    def __str__(self) -> str:
        return f"{self.alert}-{'fires' if self.fires else 'quiet'}"

    def promtool(self) -> dict[str, Any]:
        rule = ALERTS[self.alert]
        alerts = []
        if self.fires:
            labels, summary = self.fires
            annotations = {**rule["annotations"], "summary": summary}
            alerts = [{"exp_labels": {**rule["labels"], **labels}, "exp_annotations": annotations}]
        return {
            "interval": "1m",
            "input_series": [{"series": series(name, labels), "values": said} for name, labels, said in self.series],
            "alert_rule_test": [{"alertname": self.alert, "eval_time": f"{self.minute}m", "exp_alerts": alerts}],
        }


def series(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def cases() -> Iterator[Case]:
    yield from admin_down()
    yield from expiring()
    yield from not_pinned()
    yield from not_ready()
    yield from failing()
    yield from stuck()
    yield from errors()
    yield from saturated()
    yield from dropped()
    yield from collapsed()
    yield from thrashing()
    yield from switched_off()
    yield from unbalanced()


def admin_down() -> Iterator[Case]:
    name, job = "KvstowAdminDown", {**POD, "job": "kv"}
    alive = ("kvstow_ready", OTHER, "1x60")
    gone = ("kvstow_ready", POD, "1x10 stale")
    down = ("up", job, "1x10 0x50")
    yield Case(name, 20, (alive, gone, down), (job, "No metrics of KVStow in ml/vllm-0 at 10.0.0.7:9595."))
    yield Case(name, 20, (), ({}, "No metrics of KVStow."))
    yield Case(name, 12, (alive, gone, down))
    yield Case(name, 20, (alive, gone, ("up", job, "1x10 stale")))  # a pod that was deleted
    yield Case(name, 20, (alive, ("up", {**job, "job": "another"}, "0x60")))


def expiring() -> Iterator[Case]:
    name, key, week = "KvstowCertificateExpires", "kvstow_tls_certificate_expiry_timestamp_seconds", 7 * 86400
    # promtool's clock starts on 1 January 1970; here it is 0:20.
    yield Case(name, 20, ((key, POD, f"{week}x30"),), (POD, f"The certificate of {WHERE} expires in 6d 23h 40m 0s."))
    yield Case(name, 20, ((key, POD, f"{week + 1200}x30"),))
    yield Case(name, 20, ((key, POD, f"{week}x10 {9 * week}x20"),))  # it was renewed in time


def not_pinned() -> Iterator[Case]:
    name, rank = "KvstowPoolNotPinned", {**POD, "rank": "1"}

    def progress(values: str) -> tuple[tuple[str, dict[str, str], str]]:
        return (("kvstow_pin_progress_ratio", {**rank, "pool": "host"}, values),)

    yield Case(name, 15, progress("0.5x60"), (rank, f"Pinning has stopped at 50% on rank 1 of {WHERE}."))
    yield Case(name, 5, progress("0.5x60"))
    yield Case(name, 15, progress("0+0.01x60"))
    yield Case(name, 15, progress("1x60"))
    yield Case(name, 40, progress("0+0.01x20 0.2x40"), (rank, f"Pinning has stopped at 20% on rank 1 of {WHERE}."))


def not_ready() -> Iterator[Case]:
    name, rank = "KvstowRankNotReady", {**POD, "rank": "1"}
    summary = f"Rank 1 of {WHERE} does not report, or cannot pin or copy."
    yield Case(name, 10, (("kvstow_rank_ready", rank, "0x20"),), (rank, summary))
    yield Case(name, 10, (("kvstow_rank_ready", rank, "1x8 0x10"),))  # a restart that is short enough
    yield Case(name, 10, (("kvstow_rank_ready", rank, "1x20"),))


def failing() -> Iterator[Case]:
    name, check = "KvstowNotReady", {**POD, "check": "ticker"}
    red = ("kvstow_health_check", {**check, "probe": "readyz"}, "0x20")
    yield Case(name, 10, (red,), (check, f"The check ticker of {WHERE} has failed for five minutes."))
    yield Case(name, 10, (("kvstow_health_check", {**check, "probe": "readyz"}, "0x4 1x20"),))
    yield Case(name, 10, (red, ("kvstow_state", {**POD, "state": "draining"}, "1x20")))  # another alert's, as is:
    yield Case(name, 10, (red, ("kvstow_errors_total", {**POD, "component": "engine", "code": "integrity"}, "1x20")))
    for other in ("ranks", "pinned"):
        yield Case(name, 10, (("kvstow_health_check", {**POD, "check": other, "probe": "readyz"}, "0x20"),))


def stuck() -> Iterator[Case]:
    name = "KvstowTransfersStuck"
    yield Case(name, 5, (("kvstow_transfers_stuck", POD, "2x10"),), (POD, f"2 transfers of {WHERE} are stuck."))
    yield Case(name, 5, (("kvstow_transfers_stuck", POD, "0x10"),))


def errors() -> Iterator[Case]:
    name, load = "KvstowTransferErrors", {**POD, "direction": "load"}
    failed, well = {**load, "result": "error"}, {**load, "result": "ok"}
    fires = (load, f"11 transfers (load) of {WHERE} failed within 10 minutes.")
    yield Case(name, 10, (("kvstow_transfers_total", failed, "0x5 11x20"),), fires)
    yield Case(name, 40, (("kvstow_transfers_total", failed, "0x5 11x60"),))  # over half an hour ago
    yield Case(name, 10, (("kvstow_transfers_total", failed, "0x20"), ("kvstow_transfers_total", well, "0+99x20")))


def saturated() -> Iterator[Case]:
    name = "KvstowQueueSaturated"

    def waits(direction: str, short: str, long: str) -> tuple[tuple[str, dict[str, str], str], ...]:
        labels = {**POD, "direction": direction}
        counts = {"1.0": short, "3.0": long, "+Inf": long}
        return tuple(("kvstow_transfer_queue_wait_seconds_bucket", {**labels, "le": le}, n) for le, n in counts.items())

    summary = f"One load in ten of {WHERE} waits in the queue for 2.6s or longer."
    yield Case(name, 30, waits("load", "0+60x60", "0+120x60"), (POD, summary))
    yield Case(name, 30, waits("load", "0+110x60", "0+120x60"))
    yield Case(name, 30, waits("load", "0x60", "0x60"))
    yield Case(name, 30, waits("store", "0+60x60", "0+120x60"))


def dropped() -> Iterator[Case]:
    name, key = "KvstowStoreDropsHigh", "kvstow_store_blocks_total"
    stored = (key, {**POD, "outcome": "stored"}, "0+80x60")
    summary = "ml/vllm-0 (10.0.0.7:9595) drops 20% of the blocks offered to it: all slots are in use."
    yield Case(name, 30, (stored, (key, {**POD, "outcome": "dropped_cpu_full"}, "0+20x60")), (POD, summary))
    yield Case(name, 30, (stored, (key, {**POD, "outcome": "dropped_cpu_full"}, "0+2x60")))
    yield Case(name, 30, (stored, (key, {**POD, "outcome": "skipped_already_cached"}, "0+900x60")))


def collapsed() -> Iterator[Case]:
    name = "KvstowHitRatioCollapsed"
    day = 26 * 60
    asked = ("kvstow_query_tokens_total", POD, f"0+100x{2 * day}")
    hits = {**POD, "source": "host"}
    # In promtool's notation, a+bxn continues from a.
    fell = ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}+15x{day}")
    summary = "The hit ratio of ml/vllm-0 (10.0.0.7:9595) has fallen to 15%, less than half of the day before."
    yield Case(name, day + 50, (asked, fell), (POD, summary))
    yield Case(name, day + 50, (asked, ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}+40x{day}")))
    night = ("kvstow_query_tokens_total", POD, f"0+100x{day} {100 * day}+10x{day}")
    yield Case(name, day + 50, (night, ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}+1x{day}")))
    idle = ("kvstow_query_tokens_total", POD, f"0+100x{day} {100 * day}x{day}")
    yield Case(name, day + 50, (idle, ("kvstow_hit_tokens_total", hits, f"0+60x{day} {60 * day}x{day}")))
    few = ("kvstow_hit_tokens_total", hits, f"0+5x{day} {5 * day}x{day}")
    yield Case(name, day + 50, (asked, few))  # it was not worth much before


def thrashing() -> Iterator[Case]:
    name = "KvstowThrashing"
    usable = ("kvstow_pool_usable_blocks", {**POD, "pool": "host"}, "1000x60")
    evicted = ("kvstow_evicted_blocks_total", {**POD, "pool": "host", "reason": "capacity"}, "0+150x60")
    loads = {**POD, "direction": "load"}
    summary = f"{WHERE} evicted 1.5k blocks in 10 minutes, more than the pool has slots, and loaded few."
    yield Case(name, 45, (usable, evicted, ("kvstow_transfer_blocks_total", loads, "0+5x60")), (POD, summary))
    yield Case(name, 45, (usable, evicted, ("kvstow_transfer_blocks_total", loads, "0+100x60")))
    large = ("kvstow_pool_usable_blocks", {**POD, "pool": "host"}, "9000x60")
    yield Case(name, 45, (large, evicted, ("kvstow_transfer_blocks_total", loads, "0x60")))
    purged = ("kvstow_evicted_blocks_total", {**POD, "pool": "host", "reason": "purge"}, "0+150x60")
    few = ("kvstow_evicted_blocks_total", {**POD, "pool": "host", "reason": "capacity"}, "0+1x60")
    yield Case(name, 45, (usable, purged, few, ("kvstow_transfer_blocks_total", loads, "0x60")))


def switched_off() -> Iterator[Case]:
    name, lookups, stores = "KvstowSwitchedOff", "kvstow_fallbacks_total", "kvstow_store_blocks_total"
    bypassed = {**POD, "reason": "bypassed"}
    fires = (POD, f"The cache of {WHERE} has been switched off, fully or partly, for an hour.")
    yield Case(name, 100, ((lookups, bypassed, "0+5x120"),), fires)
    yield Case(name, 100, ((stores, {**POD, "outcome": "skipped_bypass"}, "0+5x120"),), fires)
    yield Case(name, 100, (("kvstow_state", {**POD, "state": "draining"}, "1x120"),), fires)  # and nothing comes
    yield Case(name, 40, ((lookups, bypassed, "0+5x30 150x90"),))  # for half an hour
    yield Case(name, 100, ((lookups, {**POD, "reason": "not_ready"}, "0+5x120"),))  # another alert's
    yield Case(name, 100, ((stores, {**POD, "outcome": "skipped_already_cached"}, "0+5x120"),))


def unbalanced() -> Iterator[Case]:
    name, key = "KvstowIntegrityCheckFailed", "kvstow_errors_total"
    labels = {**POD, "component": "engine"}
    summary = f"The integrity check of {WHERE} has failed."
    yield Case(name, 5, ((key, {**labels, "code": "integrity"}, "1x9"),), (POD, summary))
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
