"""Tables and field lists: nothing is folded or cut, on a terminal of any width."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from tests.api.tieredhost import ShownTiers, TieredHost
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import use_keys
from tests.service.cli.terminal import Terminal

from kvstow.control.engine import OffloadEngine
from kvstow.hints import Hints, context_id
from kvstow_api import answers
from kvstow_api.texts import ABSENT
from kvstow_service.cli.output import pairs, styled, table, text_of
from kvstow_service.cli.tables import LISTS, Column, Columns

COLUMNS = Columns[tuple[str, str]](
    "name",
    Column("name", lambda item: item[0]),
    Column("size", lambda item: item[1], "lists"),
    Column("more", lambda item: "m", "wide"),
)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([("a", "1 GiB"), ("longer", "2")], COLUMNS) == "NAME    SIZE\na       1 GiB\nlonger  2"
    assert table([("a", "1")], COLUMNS, wide=True) == "NAME  SIZE  MORE\na     1     m"
    assert table([], COLUMNS) == "NAME  SIZE"


def test_wide_characters_count_as_two_columns() -> None:
    assert table([("日本", "1"), ("abcd", "2")], COLUMNS).splitlines()[1:] == ["日本  1", "abcd  2"]


def test_a_cell_is_one_line_and_has_no_escapes() -> None:
    assert table([("a\nb\x1b[31m", "1")], COLUMNS).splitlines()[1] == "a b [31m  1"
    assert pairs([("error", "first\nsecond")]) == "error  first second"


def test_names_are_aligned_with_their_depth() -> None:
    assert pairs([("pool", ""), ("  size", "1 GiB")]) == "pool\n  size  1 GiB"
    assert pairs([]) == ""


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert styled("ready", "green") == "ready"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert styled("ready", "green") == "\x1b[32mready\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("ready", "green") == "ready"


@pytest.fixture
def crowded(make_host: Any, run: Any) -> Iterator[Any]:
    """A host with something in each list, and long names everywhere."""
    tiered: list[TieredHost] = []

    def make_tier(engine: OffloadEngine) -> ShownTiers:
        tiered.append(TieredHost(engine, FakeClock()))
        return tiered[0].tiers

    host = make_host(make_tier=make_tier)
    tiered[0].begin()
    keys = [bytes([number]) * 32 for number in range(3)]
    host.store(*keys)
    use_keys(host.engine, keys, hints=Hints(context_id("trip")))
    host.engine.begin_store([b"\xff" * 32], [0], request_id="request-" + "0123456789abcdef" * 2)
    host.ranks[1].state, host.ranks[1].error = "degraded", "the next chunk does not fit: 64 MiB are left"
    host.ranks[1].report()
    assert run("evict", "--slots", "1", "--yes", "--server", host.url).exit_code == 0
    assert run("resize", "--slots", "1", "--yes", "--no-wait", "--server", host.url).exit_code == 0
    yield host
    tiered[0].close()


@pytest.mark.parametrize("noun", sorted(LISTS.keys() - {"curve"}))  # its rows are sizes, after hundreds of requests
def test_ids_can_be_copied_from_a_narrow_terminal(
    crowded: Any, run: Any, child_environ: dict[str, str], noun: str
) -> None:
    kind = LISTS[noun]
    items = json.loads(run("get", noun, "-o", "json", "--server", crowded.url).stdout)["items"]
    assert items
    with Terminal("get", noun, "--server", crowded.url, environ=child_environ, columns=40) as terminal:
        assert terminal.end() == 0
        titles, *rows = re.sub(r"\x1b\[\d+m", "", terminal.text).splitlines()
    titled = [column.title.upper() for column in kind.of("everywhere", "lists")]
    assert [title for title in titled if title not in titles] == []
    assert len(rows) == len(items), "a row is one line, which the terminal wraps"
    ids = [item[kind.name] for item in items]  # those of contexts are for admins
    assert {row.split()[0] for row in rows} == {ABSENT if one is None else str(one) for one in ids}
    assert not any(line.endswith(" ") for line in (titles, *rows))


def test_every_answer_of_the_api_can_be_printed_as_json_and_yaml() -> None:
    """`-o json` and `-o yaml` of each command print such answers: with all fields, and with null for what may be."""
    views = [one for one in vars(answers).values() if isinstance(one, type) and is_dataclass(one)]
    assert len(views) > 20
    for view in views:
        for nulls in (False, True):
            made = value_of(view, nulls=nulls)
            text = text_of(made, "json", str)
            assert json.loads(text, parse_constant=pytest.fail) == yaml.safe_load(text_of(made, "yaml", str)), view


def value_of(hint: Any, *, nulls: bool) -> Any:
    """A value of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return value_of(arguments[0], nulls=nulls)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, UnionType):
        return None if nulls and NoneType in arguments else value_of(arguments[0], nulls=nulls)
    if origin in (list, Sequence):
        return [value_of(arguments[0], nulls=nulls)]
    if origin is tuple:
        return tuple(value_of(one, nulls=nulls) for one in arguments if one is not ...)
    if origin in (dict, Mapping):
        return {value_of(arguments[0], nulls=nulls): value_of(arguments[1], nulls=nulls)}
    if hint is datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)
    if hint is Any:
        return {"a": [1, None, "b"]}
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        hints = get_type_hints(hint)
        names = [one.name for one in fields(hint)] if is_dataclass(hint) else hint._fields
        return hint(**{name: value_of(hints[name], nulls=nulls) for name in names})
    return hint(1)
