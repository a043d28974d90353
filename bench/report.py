"""Tables of figures, and the part of `README.md` that each benchmark owns, between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).with_name("README.md")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        ruler = ["---", *("---:" for _ in self.head[1:])]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, ruler, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def write_section(name: str, introduction: str, tables: Sequence[Table]) -> None:
    """Replace what lies between the markers of `name` in the README; raises `ValueError` where they are missing."""
    begin, end = f"<!-- {name}: written by python -m bench -->", f"<!-- end of {name} -->"
    text = README.read_text()
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{README} has no markers for {name!r}")
    parts = [introduction, *(table.to_markdown() for table in tables)]
    README.write_text("".join([before, begin, "\n", "\n\n".join(parts), "\n", end, after]))
