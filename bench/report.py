"""The results of benchmarks: a JSON file for the newest run of each, in `results/`, and a page that is made of them.

A file says what was measured, with which command, when, on which machine and at which commit. Its tables have all
figures as text. `README.md` shows the rows of each table that `shown` names, or else those with a verdict."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).with_name("README.md")
# The page: its sections, and the results of each in the order in which they are shown.
SECTIONS = {
    "Inside vLLM on a GPU": (
        *("vllm-headline", "vllm-agentx", "vllm-peers", "vllm-layers", "vllm-pinning", "vllm-restart", "vllm-rotation"),
        *("vllm-verify", "vllm-throughput", "vllm-decode", "vllm-start", "vllm-worth"),
    ),
    "Moving bytes on a GPU": ("gpu-rates", "gpu-submit", "gpu-token", "gpu-layers", "gpu-pinning", "gpu-attach"),
    "Control plane": ("control", "holds", "policy", "curve", "retention", "agents", "vllm-agents", "steps"),
    "Node service and admin server": ("attach", "admin", "startup"),
    "Stores below the pools": ("tier", "disk", "diskrates", "diskfaults"),
    "JAX": ("jax-gpu", "jax-cpu"),
}
FILES_ONLY = ("jax-order", "populate", "trace")
"""Results that the page does not show."""
_VERDICT = re.compile(r"\b(met|missed)\b")
_INTRODUCTION = """\
# Benchmarks

This page shows the newest figures. `python -m bench page` makes it of the files in [results](results), which have \
all rows; older ones are in git. It leaves jax-order, populate and trace to the files. `make bench` runs what needs no \
GPU (12 minutes on two cores) and writes the files; `.venv/bin/python -m bench control` runs one benchmark, `--help` \
lists the options. Programs for GPUs run from a bare checkout: `python3 -m bench.gpu`, `python3 -m bench.vllm`, \
`python3 -m bench.jax`; what they print is put into the files by hand.

The bars are the project's own targets. A figure that misses its bar says so, and its file in [results](results) says \
why. Figures depend on the machine and its load, so compare only within a table. Comparing with vLLM's BlockPool needs \
`make venv-vllm` once.
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text. The first column is left-aligned, and the others are right-aligned. `shown` has the numbers of the
    rows on the page."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    shown: Sequence[int] | None = None

    def to_markdown(self) -> str:
        return f"**{self.title}**\n\n{_grid(self.head, self.rows)}"

    def rows_on_the_page(self) -> list[Sequence[str]]:
        if self.shown is not None:
            return [self.rows[index] for index in self.shown]
        return [row for row in self.rows if any(map(_VERDICT.search, row))]


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark's newest figures. `what` is the workload in a sentence, and `headline` the result, where no row on
    the page says it. The page does not have `missed`, which says why a bar is missed, and `notes`, which say what else
    qualifies the figures."""

    title: str
    command: str
    date: str
    machine: str
    commit: str | None
    what: str
    tables: Sequence[Table]
    headline: str = ""
    missed: str = ""
    notes: Sequence[str] = field(default=())

    def to_markdown(self) -> str:
        commit = f"; {self.commit}" if self.commit else ""
        command = f"`{self.command}`" if " -m " in self.command else self.command
        parts = [f"### {self.title}", f"{self.what} {self.headline}".rstrip()]
        shown = [(table, rows) for table in self.tables if (rows := table.rows_on_the_page())]
        for table, rows in shown:
            parts.append(_grid([table.title if len(shown) > 1 else table.head[0], *table.head[1:]], rows))
        return "\n\n".join([*parts, f"{command}, {self.date}; {self.machine}{commit}"])


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows))


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def load(path: Path) -> Result:
    found = json.loads(path.read_text())
    return Result(**{**found, "tables": [Table(**table) for table in found["tables"]]})


def save(name: str, result: Result) -> None:
    found = asdict(result)
    for table in found["tables"]:
        if table["shown"] is None:
            del table["shown"]
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def record(name: str, machine: str, tables: Sequence[Table]) -> None:
    """Replace the tables of the last run by those of a run of today, and make the page again."""
    last = load(RESULTS / f"{name}.json")
    today = datetime.now(UTC).date().isoformat()
    save(name, replace(last, date=today, machine=machine, commit=_commit(), tables=tables, headline=""))
    PAGE.write_text(page())


def page() -> str:
    """Return the whole page, as Markdown."""
    parts = [_INTRODUCTION.rstrip()]
    for section, names in SECTIONS.items():
        parts += [f"## {section}", *(load(RESULTS / f"{name}.json").to_markdown() for name in names)]
    return "\n\n".join(parts) + "\n"


def _commit() -> str | None:
    """Return the commit of the checkout, or None outside of one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
