"""Conditions of the disks below a node's pools."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow.bytesize import format_size
from kvstow.tier.blockstore import StorePart
from kvstow_api.conditions.evidence import Evidence, Found, condition, make_condition
from kvstow_api.texts import counted

_MOST_DRIVE_WRITES = 1.0
"""Data centre drives are rated for this many writes of their whole capacity per day, over five years."""
FAULTS_OF_DISKS = ("failed", "in use", "stuck")
"""The states of a disk for which this module has conditions."""


def _disks(evidence: Evidence) -> Iterator[StorePart]:
    return iter(evidence.tier.parts if evidence.tier.store == "disk" else ())


@condition("disk_ready", "tier", "tier")
def find_disks_that_do_not_work(evidence: Evidence) -> Found:
    for disk in _disks(evidence):
        if disk.state == "failed":
            yield make_condition(
                "error",
                f"disk {disk.name} does not work: {disk.reason}",
                "its blocks are computed again; nothing else is affected",
                "remove the cause: the disk is tried every 5 s. A broken one harms nothing, so leave it out at the "
                "next start; a start for that alone keeps the cache of the memory only with --state and --keep-on-stop",
                failed_blocks=disk.counters.failed_blocks,
            )
        if disk.state == "in use":
            yield make_condition(
                "warning",
                f"disk {disk.name} is in use: {disk.reason}",
                "its blocks are computed again; nothing else is affected",
                "find the process that has its files open (`fuser PATH/kvstow/records`): another service, or one that "
                "was killed and still waits for the disk",
            )


@condition("disk_stuck", "tier", "tier")
def find_disks_that_hang(evidence: Evidence) -> Found:
    for disk in _disks(evidence):
        if disk.state == "stuck":
            yield make_condition(
                "error",
                f"disk {disk.name} hangs: {disk.reason}; it keeps {counted(disk.stuck_slots, 'slot')}",
                "nothing more is asked of it, and its slots stay unused until it goes on",
                "`ps axo pid,stat,wchan,args | grep diskchild` shows its process: T is stopped, and `kill -CONT` lets "
                "it go on; D waits for the kernel, which alone can end the operation: `dmesg` has the timeouts of a "
                "drive, and a file system that is frozen (fsfreeze) or throttled looks the same. A restart of the "
                "service does not help",
                stuck_slots=disk.stuck_slots,
                timeouts=disk.counters.timeouts,
            )


@condition("disk_wear", "tier")
def find_disks_that_wear_out(evidence: Evidence) -> Found:
    for disk in _disks(evidence):
        per_day = disk.drive_writes_per_day
        if disk.write_budget_bytes is None and per_day is not None and per_day > _MOST_DRIVE_WRITES:
            yield make_condition(
                "warning",
                f"{per_day:.1f} times the capacity of disk {disk.name} are written to it in a day, "
                f"{format_size(disk.written_bytes_today or 0)} in the last one",
                "drives are rated for one a day, or for up to three, over five years",
                "bound it with --disk-writes at the next start, such as the capacity of the drive; or use drives that "
                "are rated for more",
                drive_writes_per_day=per_day,
                written_bytes_today=disk.written_bytes_today or 0,
            )


@condition("disk_corrupt", "tier")
def find_disks_that_change_bytes(evidence: Evidence) -> Found:
    for disk in _disks(evidence):
        if corrupt := evidence.corrupt.get(disk.name):
            yield make_condition(
                "error",
                f"within a day, {counted(corrupt, 'block')} on disk {disk.name} were not what was written there",
                "they were not loaded, and were removed; but the drive, its controller or somebody else changes bytes",
                "check the drive (`smartctl -a`) and the machine's memory; replace the drive if it happens again",
                corrupt_blocks=corrupt,
                read_blocks=disk.counters.read_blocks,
            )
