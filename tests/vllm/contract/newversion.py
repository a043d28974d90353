"""`make new-vllm VERSION=0.34.0`: compare a version of vLLM with what KVStow relies on, and with the newest one that
the tests run. docs/newvllm.md says what to do with what it finds."""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.vllm.contract.drift import Drift
from tests.vllm.contract.ours import Ours
from tests.vllm.contract.reliance import BASE, MODULE, ORDERS, PROTOCOLS, STATEMENTS
from tests.vllm.contract.source import Source
from tests.vllm.environments import sources
from tests.vllm.valuesources import without_verdict

ROOT = Path(__file__).parents[3]
FETCHED = ROOT / "build" / "new-vllm"


class Place(NamedTuple):
    """A function or method of vLLM: `name` is `function` or `Class.method`."""

    module: str
    name: str


class Change(NamedTuple):
    """A function that KVStow relies on and that differs, with the lines of both versions. Comments do not count."""

    place: Place
    diff: list[str]


def relied_on(ours: Ours, theirs: Source) -> list[Place]:
    """Functions of vLLM that KVStow calls or overrides, or in which it relies on an order of calls."""
    places = {Place(*key) for key in (*ORDERS, *STATEMENTS) if key[1] != MODULE}
    base = theirs.cls(*BASE)
    places |= {Place(BASE[0], f"{BASE[1]}.{hook}") for hook in (base.functions if base else ())}
    for (our_module, our_name), (module, name) in PROTOCOLS.items():
        places |= {Place(module, f"{name}.{member}") for member in ours.protocol(our_module, our_name)}
    for use in ours.uses():
        attribute = f".{use.attribute}" if use.attribute else ""
        places.add(Place(use.imported.module, f"{use.imported.name}{attribute}"))
    return sorted(places)


def changes(ours: Ours, old: Source, new: Source) -> Iterator[Change]:
    """Of functions that both versions have. `Drift` names those that are gone."""
    for place in relied_on(ours, old):
        before, after = old.function(*place), new.function(*place)
        if before is not None and after is not None:
            one, other = (ast.unparse(each.node).splitlines() for each in (before, after))
            if one != other:
                yield Change(place, list(difflib.unified_diff(one, other, "before", "after", lineterm="", n=2)))


def fetch(version: str, folder: Path) -> Path:
    """The folder below which the Python files of this version lie; fetched once. Raises `CalledProcessError` if the
    index has no such version."""
    target = folder / version
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            options = ("--no-deps", "--no-cache-dir", "--only-binary=:all:", "--quiet", "--dest", scratch)
            subprocess.run([sys.executable, "-m", "pip", "download", *options, f"vllm=={version}"], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
                archive.extractall(Path(scratch) / "found", names)
            (Path(scratch) / "found").rename(target)
    return target


def main(version: str, newest: str) -> int:
    ours = Ours(ROOT / "service")
    root = fetch(version, FETCHED)
    new = Source(root)
    sentences = Drift(ours, new, version).sentences()
    undecided = without_verdict(root)
    found = list(changes(ours, Source(sources(newest)), new))
    target = FETCHED / f"{version}.diff"
    target.write_text("\n\n".join("\n".join([f"# {'.'.join(one.place)}", *one.diff]) for one in found) + "\n")
    print(f"vLLM {version}, compared with {newest}")
    _list("To be mended, or to be noted in reliance.py", sentences)
    _list("Without a verdict in valuesources.py: do they change KV?", undecided)
    _list(f"Changed, and KVStow relies on it: read {target.relative_to(ROOT)}", [".".join(one.place) for one in found])
    return 1 if sentences or undecided else 0


def _list(title: str, lines: list[str]) -> None:
    print(f"\n{title}: {len(lines) or 'nothing'}")
    for line in lines:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
