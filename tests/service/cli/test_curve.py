"""The hits of a pool by its size, in `kvstow get curve` and `kvstow top`, against a real server."""

from __future__ import annotations

import hashlib
import json

import pytest
from tests.doubles.rank import use_keys
from tests.service.cli.conftest import CAPACITY, SLOT_BYTES, Host, Run

LOOP = [hashlib.sha256(bytes([number])).digest() for number in range(CAPACITY + CAPACITY // 2)]


@pytest.fixture
def busy(host: Host) -> Host:
    """Its pool would hit everything with twice the memory."""
    for number in range(400):
        use_keys(host.engine, [LOOP[number % len(LOOP)]])
    host.engine.tick()
    return host


def test_the_curve_is_listed_with_what_follows_from_it(busy: Host, kvstow: Run) -> None:
    told = kvstow("get", "curve")
    lines = told.stdout.splitlines()
    assert lines[0].split() == ["SLOTS", "SIZE", "TIMES", "HITS", "ERROR", "NOTE", "OF", "ALL", "BLOCKS"]
    (now,) = [line for line in lines if " now " in line]
    assert now.split()[:4] == ["16", "128", "KiB", "1"]
    assert lines[1].endswith(" -")
    assert lines[lines.index(now) + 1].endswith("█" * 40), "twice the size hits everything"
    assert lines[-3] == ""
    assert lines[-1].startswith("disks of ")
    assert lines[-2].startswith("twice the memory (256 KiB) would add ")
    found = json.loads(kvstow("get", "curve", "-o", "json").stdout)
    assert (found["advice"], found["num_bytes"]) == (lines[-2], CAPACITY * SLOT_BYTES * 2)
    assert kvstow("get", "curve", "-o", "name").stdout.split()[0] == "2"


def test_before_there_is_evidence_the_table_is_a_sentence(kvstow: Run) -> None:
    assert kvstow("get", "curve").stdout.startswith("too early to tell")
