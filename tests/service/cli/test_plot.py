"""`kvstow get curve` and `kvstow plot curve` against a real server, and the drawing itself."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest
from tests.doubles.rank import use_keys
from tests.service.cli.conftest import CAPACITY, SLOT_BYTES, Host, Run

from kvstow_api.answers import PoolCurveView
from kvstow_api.openapi import EXAMPLES
from kvstow_service.cli.failures import ExitCode
from kvstow_service.cli.plotting import Line, Plot, drawn

VIEW = msgspec.convert(EXAMPLES["PoolCurveView"], PoolCurveView)
LOOP = [hashlib.sha256(bytes([number])).digest() for number in range(CAPACITY + CAPACITY // 2)]


@pytest.fixture
def busy(host: Host) -> Host:
    """Its pool would hit everything with twice the memory."""
    for number in range(400):
        use_keys(host.engine, [LOOP[number % len(LOOP)]])
    host.engine.tick()
    return host


def test_the_curve_is_listed_with_what_follows_from_it(busy: Host, run: Run) -> None:
    told = run("get", "curve", "--server", busy.url)
    lines = told.stdout.splitlines()
    assert lines[0].split() == ["SLOTS", "SIZE", "TIMES", "HITS", "ERROR", "NOTE"]
    (now,) = [line for line in lines if line.endswith("now")]
    assert now.split()[:4] == ["16", "128", "KiB", "1"]
    assert lines[-3] == ""
    assert lines[-1].startswith("disks of ")
    assert lines[-2].startswith("twice the memory (256 KiB) would add ")
    found = json.loads(run("get", "curve", "--server", busy.url, "-o", "json").stdout)
    assert (found["advice"], found["num_bytes"]) == (lines[-2], CAPACITY * SLOT_BYTES * 2)
    assert run("get", "curve", "--server", busy.url, "-o", "name").stdout.split()[0] == "2"


def test_the_curve_is_drawn_with_what_follows_from_it(busy: Host, run: Run) -> None:
    told = run("plot", "curve", "--server", busy.url)
    assert told.exit_code == 0
    assert "● policy auto" in told.stdout
    assert "┊ now" in told.stdout
    assert told.stdout.splitlines()[-2].startswith("twice the memory (256 KiB) would add ")


def test_nothing_is_drawn_before_there_is_evidence(host: Host, run: Run) -> None:
    told = run("plot", "curve", "--server", host.url)
    assert told.exit_code == ExitCode.NOT_READY
    assert "too early to tell" in told.stderr
    assert run("get", "curve", "--server", host.url).stdout.startswith("too early to tell")


# -- the drawing -------------------------------------------------------------------------------------------------------


def test_a_drawing_has_its_lines_at_their_heights() -> None:
    plot = Plot("hits", [1, 2, 4], ["one", "two", "four"], [Line("rising", [0.0, 0.25, 0.5])], now=1)
    lines = drawn(plot, width=48, height=11).splitlines()
    assert lines[0] == "hits"
    rows = lines[1:12]
    assert [number for number, row in enumerate(rows) if "●" in row] == [1, 5, 10], "of 55, 25 and 0 %"
    assert len({row.index("┊") for row in rows if "┊" in row}) == 1
    assert sum("┊" in row for row in rows) > 5
    assert rows[-1].strip().startswith("0 % │●")
    assert [lines[-2].split(), lines[-1].split()] == [["one", "two", "four"], ["●", "rising", "┊", "now"]]
    assert all(len(line) <= 48 + 8 for line in lines)


def test_labels_that_have_no_room_are_left_out_but_not_that_of_now() -> None:
    sizes = [1000, 1010, 1020, 1030, 2000]
    plot = Plot("", sizes, list(map(str, sizes)), [Line("", [0.1] * 5)], now=2)
    assert drawn(plot, width=40).splitlines()[-2].split() == ["1020", "2000"]


@pytest.mark.parametrize("ratios", [[None, 0.5, None], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
def test_gaps_and_extremes_are_drawn(ratios: list[float | None]) -> None:
    text = drawn(Plot("", [1, 2, 4], ["a", "b", "c"], [Line("x", ratios)], limit=1.0, limit_name="all"))
    assert text.count("●") == sum(ratio is not None for ratio in ratios) + 1
    assert "┈ all 100.0 %" in text


def test_one_size_is_drawn() -> None:
    assert "●" in drawn(Plot("", [8], ["a"], [Line("x", [0.5])]))


def test_top_has_a_bar_for_each_size_in_one_line(busy: Host, run: Run) -> None:
    lines = [line for line in run("top", "--server", busy.url).stdout.splitlines() if line.startswith("by size")]
    assert len(lines) == 1, run("top", "--server", busy.url).output
    assert lines[0].split()[2:] == ["▁▁▁▁█████", "0.0", "%", "now,", "100.0", "%", "with", "256", "KiB"]


def test_top_says_in_one_line_that_it_is_too_early(host: Host, run: Run) -> None:
    (line,) = [line for line in run("top", "--server", host.url).stdout.splitlines() if line.startswith("by size")]
    assert line.split()[2:5] == ["too", "early", "to"]
