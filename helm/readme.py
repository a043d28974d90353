"""Write the table of values in kvstow/README.md from the comments in kvstow/values.yaml; --check only compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CHART = Path(__file__).parent / "kvstow"
BEGIN, END = "<!-- values: written by helm/readme.py -->\n", "<!-- end of values -->\n"

_KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?: (?P<default>.+))?")


class Value(NamedTuple):
    path: str
    default: str
    text: str


def read_values(lines: list[str]) -> Iterator[Value]:
    """Every key, with the comment above it and the default on its line. Raises `ValueError` for a line that is neither
    a comment nor a key below one."""
    parents: list[str] = []
    comment: list[str] = []
    for line in filter(None, lines):
        if line.lstrip().startswith("#"):
            comment.append(line.strip(" #"))
            continue
        match = _KEY.fullmatch(line)
        if match is None or not comment:
            raise ValueError(f"not a key with a comment above it: {line!r}")
        parents = [*parents[: len(match["indent"]) // 2], match["key"]]
        yield Value(".".join(parents), match["default"] or "", " ".join(comment))
        comment = []


def table(values: Iterator[Value]) -> str:
    rows = (f"| `{path}` | {f'`{default}`' if default else ''} | {text} |\n" for path, default, text in values)
    return "| value | default | |\n|---|---|---|\n" + "".join(rows)


def main() -> int:
    readme = CHART / "README.md"
    present = readme.read_text()
    before, _, rest = present.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + table(read_values((CHART / "values.yaml").read_text().splitlines())) + END + after
    if "--check" not in sys.argv[1:]:
        readme.write_text(wanted)
    elif wanted != present:
        print(f"{readme} is out of date: run {__file__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
