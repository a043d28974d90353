"""The API guide's examples, run one after the other against a server, and its table of routes."""

from __future__ import annotations

import argparse
import doctest
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import httpx
import pytest
from tests.doubles.rank import make_ranks, store_keys

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost

GUIDE = Path(__file__).parents[2] / "docs" / "api.md"
TOKEN = "a-token-of-an-admin"
SOCKET = "unix:/run/kvstow-admin/admin.sock"
MATCHING = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_BLOCK = re.compile(r"^```(console|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROUTE = re.compile(r"^\| `(GET|PUT|POST|PATCH|DELETE) (/\S*)` \|", re.MULTILINE)


class Example(NamedTuple):
    """What is typed, and what the guide says that it answers."""

    language: str
    typed: str
    answer: str


def examples(guide: str) -> Iterator[Example]:
    for block in _BLOCK.finditer(guide):
        language, text = block.groups()
        if language == "pycon":
            for found in doctest.DocTestParser().get_examples(text):
                yield Example(language, found.source, found.want)
        else:
            for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                typed, _, answer = command.replace("\\\n", " ").partition("\n")
                yield Example(language, typed, answer)


EXAMPLES = tuple(examples(GUIDE.read_text()))


class Curl:
    """As much of curl as the guide uses: `-s -N -i -X -H -d URL`."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables
        self._parser = argparse.ArgumentParser(prog="curl", exit_on_error=False)
        self._parser.add_argument("url")
        for flag in ("-s", "-N", "-i"):
            self._parser.add_argument(flag, action="store_true")
        self._parser.add_argument("-X", dest="method")
        self._parser.add_argument("-H", dest="headers", action="append", default=[])
        self._parser.add_argument("-d", dest="data")

    def run(self, words: list[str], num_lines: int) -> str:
        """What it prints; of a stream that does not end, only so many lines."""
        given = self._parser.parse_args([Template(word).substitute(self._variables) for word in words])
        headers = dict(header.split(": ", 1) for header in given.headers)
        if given.data is not None:
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")  # as curl does
        method = given.method or ("POST" if given.data is not None else "GET")
        with httpx.stream(method, given.url, headers=headers, content=given.data) as answer:
            head = [f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}"] if given.i else []
            head += [f"{name}: {value}" for name, value in answer.headers.items()] if given.i else []
            if answer.headers["content-type"].startswith("text/event-stream"):
                return "\n".join(line for line, _ in zip(answer.iter_lines(), range(num_lines), strict=False))
            return "\n".join([*head, answer.read().decode()])


@pytest.fixture
def server(serving: Any, tmp_path: Path) -> str:
    """URL of a server with two ranks that have pinned 4,096 slots, and 100 blocks."""
    tokens = tmp_path / "admin.txt"
    tokens.write_text(TOKEN)
    engine = OffloadEngine(EngineConfig(slot_bytes=2 << 20, capacity_slots=4096, num_ranks=2))
    store_keys(engine, make_ranks(engine), [bytes((0, 0, number)) for number in range(100)])
    context = ApiHost(
        directory=EmbeddedDirectory(engine, 8192), version="0", mode="node", token_file=tokens, addresses=(SOCKET,)
    )
    _, listeners = serving(create_app(context))
    return str(listeners.url)


def test_every_example_answers_as_the_guide_says(server: str, tmp_path: Path) -> None:
    curl = Curl({"SERVER": server, "TOKEN": TOKEN})
    known: dict[str, Any] = {"SERVER": server, "TOKEN": TOKEN}
    for number, example in enumerate(EXAMPLES):
        if example.language == "console":
            program, *words = shlex.split(example.typed)
            assert program == "curl", example.typed
            said = curl.run(words, example.answer.count("\n")) + "\n"
        else:
            said = _python(example, known)
        matches = doctest.OutputChecker().check_output(example.answer, said, MATCHING)
        assert matches, f"example {number}: {example.typed}\nanswers\n{said}\nand not\n{example.answer}"


def _python(example: Example, known: dict[str, Any]) -> str:
    """What an interactive Python prints."""
    printed: list[str] = []
    test = doctest.DocTest([doctest.Example(example.typed, example.answer)], known, "guide", None, None, None)
    runner = doctest.DocTestRunner(optionflags=MATCHING)
    result = runner.run(test, out=printed.append, clear_globs=False)
    known.update(test.globs)
    return "".join(printed) if result.failed else example.answer


def test_there_are_examples_of_both_kinds() -> None:
    kinds = [example.language for example in EXAMPLES]
    assert kinds.count("console") > 10
    assert kinds.count("pycon") > 5


def test_the_table_has_every_route(server: str) -> None:
    paths = httpx.get(f"{server}/openapi.json").json()["paths"]
    known = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    told = _ROUTE.findall(GUIDE.read_text())
    assert len(told) == len(set(told))
    assert set(told) == {(method, path) for method, path in known if not path.endswith("/{check}")}
