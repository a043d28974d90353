"""Traces of others: sessions of kv-cache-tester, and Mooncake's traces."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.replay.sessions import agents, session, turn, write

from kvstow.errors import ConfigError
from kvstow_service.replay import importing
from kvstow_service.replay.importing import ImportCounts, Importer, ImportOptions
from kvstow_service.replay.trace import Numbers, TraceRequest, events


def imported(
    paths: Sequence[Path],
    options: ImportOptions = ImportOptions(spread=0.0),  # noqa: B008 - frozen
) -> tuple[list[TraceRequest], ImportCounts, list[str]]:
    problems: list[str] = []
    importer = Importer(options, on_problem=problems.append)
    return list(importer.read([str(path) for path in paths])), importer.counts, problems


def test_a_session_keeps_its_times_ends_contexts_and_kinds_of_ends(tmp_path: Path) -> None:
    """512 tokens are 8 ids. A block that is not full is left out. A subagent is done at its `t`."""
    other = list(range(500, 520))
    helper = turn(1.0, 20 * 64, hash_ids=other, stop="end_turn", api_time=None)
    subagent = {"t": 40.0, "type": "subagent", "agent_id": "one", "duration_ms": 30_000, "requests": [helper]}
    value = session(turn(0.0, 1100), subagent, turn(50.5, 1600, stop=""))
    requests, counts, problems = imported([write(tmp_path / "work.json", value)])
    assert requests == [
        TraceRequest(0, 1100, 10, (0, 1), None, 2000, "work", "tool_use"),
        TraceRequest(11_000, 1280, 10, (3, 4), None, None, "work/one", "end_turn"),
        TraceRequest(50_500, 1600, 10, (0, 1, 2), None, 52_500, "work", ""),
    ]
    assert (counts, problems) == (ImportCounts(requests=3, sessions=1), [])


def test_requests_to_another_model_are_left_out_and_counted(tmp_path: Path) -> None:
    value = session(turn(0.0, 600), turn(1.0, 600, model="small"), turn(2.0, 600, model=None))
    requests, counts, _ = imported([write(tmp_path / "one.json", value)])
    assert [request.timestamp for request in requests] == [0, 2000]
    assert counts.other_model == 1


def test_sessions_share_their_beginning_only_where_that_is_assumed(tmp_path: Path) -> None:
    """1,100 tokens of tools and system prompt are two blocks. The third session has another prompt, the fourth another
    model."""
    values = [session(turn(0.0, 2048)) for _ in range(2)]
    values.append(session(turn(0.0, 2048), system_tokens=101))
    values.append(session(turn(0.0, 2048, model="b"), models=["b"]))
    paths = [write(tmp_path / f"{number}.json", value) for number, value in enumerate(values)]
    for is_shared in (False, True):
        requests, _, _ = imported(paths, ImportOptions(share_system=is_shared, spread=0.0))
        chains = {request.context: tuple(request.hash_ids) for request in requests}
        assert (chains["0"][:2] == chains["1"][:2]) == is_shared
        distinct = {one for ids in chains.values() for one in ids}
        assert len(distinct) == 4 * 4 - (2 if is_shared else 0)


def test_ids_that_do_not_name_a_prefix_get_numbers_that_do(tmp_path: Path) -> None:
    ids = list(range(1, 17))
    value = session(turn(0.0, 1024, hash_ids=ids), turn(1.0, 1024, hash_ids=[100, *range(2, 8), 99, *ids[8:]]))
    (first, second), _, _ = imported([write(tmp_path / "one.json", value)])
    assert not set(first.hash_ids) & set(second.hash_ids)


def test_sessions_are_merged_by_time_and_the_same_seed_gives_the_same_trace(tmp_path: Path) -> None:
    folder = agents(tmp_path / "sessions", 20)
    options = ImportOptions(spread=3600.0, seed=3)
    requests, counts, _ = imported([folder], options)
    assert [request.timestamp for request in requests] == sorted(request.timestamp for request in requests)
    assert (counts.sessions, counts.requests) == (20, len(requests))
    assert requests == imported([folder], options)[0]
    assert requests != imported([folder], ImportOptions(spread=3600.0, seed=4))[0]
    assert len({request.context for request in requests[:40]}) > 1
    assert any(event.is_end and event.number != number // 2 for number, event in enumerate(events(requests)))


def test_contexts_of_files_with_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "one.json", session(turn(0.0, 600)))
    requests, _, _ = imported([tmp_path / "a", tmp_path / "b"])
    assert sorted(str(request.context) for request in requests) == ["0", "1"]


_DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[1]", "not one JSON object with `requests`"),
        ('{"requests": 7}', "not one JSON object with `requests`"),
        (_DEEP, "recursion"),
        (json.dumps(session(block_size=48)), "block_size is 48; allowed: a divisor of 512"),
        (json.dumps(session(block_size="64")), "block_size is '64'"),
        (json.dumps(session(hash_id_scope="global")), "hash_id_scope is 'global'"),
        (json.dumps(session(tool_tokens=-1)), "tool_tokens is -1"),
        (json.dumps(session(models=[7])), "models is 7"),
    ],
)
def test_a_damaged_file_is_named_and_skipped(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    write(tmp_path / "good.json", session(turn(0.0, 600)))
    requests, counts, (problem,) = imported([tmp_path])
    assert problem.startswith(f"{tmp_path}/bad.json: ")
    assert complaint in problem
    assert (len(requests), counts) == (1, ImportCounts(requests=1, sessions=1, skipped_files=1))


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (7, "int found; a request is a JSON object"),
        ({"t": 0}, "in, out, hash_ids missing"),
        (turn(-1.0, 600), "t is -1.0"),
        (turn(float("inf"), 600), "t is inf"),
        (turn(0.0, 600, **{"in": 1.5}), "in is 1.5"),
        (turn(0.0, 600, out=None), "out is None"),
        (turn(0.0, 600, hash_ids="1"), "hash_ids is not a list of whole numbers"),
        (turn(0.0, 600, hash_ids=[1, True]), "hash_ids is not a list of whole numbers"),
        (turn(0.0, 600, hash_ids=[1, 1]), "hash_ids has an id twice"),
        (turn(0.0, 600, hash_ids=list(range(11))), "hash_ids has 11 ids for 600 tokens in blocks of 64"),
        (turn(0.0, 600, api_time="2"), "api_time is '2'"),
        (turn(0.0, 600, stop=7), "stop is 7"),
        (turn(0.0, 600, model=["a"]), "model is ['a']"),
        ({"type": "subagent"}, "a subagent: requests is not a list"),
        ({"type": "subagent", "requests": [], "t": "0"}, "a subagent: t is '0'"),
        ({"type": "subagent", "requests": [], "agent_id": "x" * 300}, "a subagent: agent_id is 'xxx"),
        ({"type": "subagent", "requests": [], "tool_tokens": None}, "a subagent: tool_tokens is None"),
    ],
)
def test_a_damaged_request_is_named_and_skipped(tmp_path: Path, bad: Any, complaint: str) -> None:
    path = write(tmp_path / "one.json", session(turn(0.0, 600), bad, turn(5.0, 600)))
    requests, counts, (problem,) = imported([path])
    assert problem.startswith(f"{path}: request 1")
    assert complaint in problem
    assert len(requests) == 2
    assert (counts.skipped_files, counts.skipped_requests) == (0, 1)


def test_a_request_of_a_subagent_is_named_by_both_numbers(tmp_path: Path) -> None:
    subagent = {"t": 9.0, "type": "subagent", "requests": [turn(0.0, 600), {}]}
    path = write(tmp_path / "one.json", session(turn(0.0, 600), turn(1.0, 600), subagent))
    _, _, (problem,) = imported([path])
    assert problem.startswith(f"{path}: request 2.1: ")


def test_files_may_be_compressed_and_what_is_cut_is_skipped(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(session(turn(0.0, 600))).encode())
    (tmp_path / "a.json.gz").write_bytes(whole)
    (tmp_path / "b.json.gz").write_bytes(whole[:-9])
    requests, counts, (problem,) = imported([tmp_path])
    assert [request.context for request in requests] == ["a"]
    assert counts.skipped_files == 1
    assert f"cannot read the trace {tmp_path}/b.json.gz" in problem


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "LARGEST_FILE", 100)
    for text in (json.dumps(session(turn(0.0, 600))), "[\n" * 60):
        (tmp_path / "one.json").write_text(text)
        _, counts, (problem,) = imported([tmp_path / "one.json"])
        assert counts.skipped_files == 1
        assert "more than 100 bytes" in problem


def test_a_folder_without_sessions_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder with files whose names end with"):
        imported([tmp_path])


def test_a_trace_of_mooncake_is_read_line_by_line_and_bad_ones_are_skipped(tmp_path: Path) -> None:
    lines = [
        "nonsense",
        '{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [4, 5]}',
        "",
        '{"timestamp": 28, "input_length": 700, "output_length": 5, "hash_ids": [4, 4]}',
        '{"timestamp": 29, "input_length": 700, "output_length": 5, "runs": [4, 3], "end": 40, "stop": "end_turn"}',
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    requests, counts, problems = imported([tmp_path / "trace.jsonl"])
    last = TraceRequest(29, 700, 5, (4, 5, 6), end=40, stop="end_turn")
    assert requests == [TraceRequest(27, 700, 5, (4, 5)), last]
    assert [problem.split(": ")[0] for problem in problems] == [f"{tmp_path}/trace.jsonl:{line}" for line in (1, 4)]
    assert counts == ImportCounts(requests=2, skipped_requests=2)


def test_a_trace_among_sessions_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [4, 5]}')
    write(tmp_path / "b.json", session(turn(0.0, 600)))
    _, counts, (problem,) = imported([tmp_path])
    assert counts.skipped_files == 1
    assert "a.json: it is not one JSON object with `requests`" in problem


_sessions = st.lists(
    st.lists(st.tuples(st.integers(0, 90), st.lists(st.integers(0, 3), min_size=24, max_size=24)), max_size=5),
    min_size=1,
    max_size=4,
)


@settings(max_examples=50, deadline=None)
@given(_sessions, st.booleans())
def test_an_id_of_a_trace_always_follows_the_same_ids(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[list[tuple[int, list[int]]]], is_shared: bool
) -> None:
    """Whatever the ids of the files are like."""
    folder = tmp_path_factory.mktemp("sessions")
    for number, turns in enumerate(sessions):
        made = [
            turn(t, 24 * 64, hash_ids=[4 * place + choice for place, choice in enumerate(choices)])
            for t, choices in turns
        ]
        write(folder / f"{number}.json", session(*made))
    requests, counts, problems = imported([folder], ImportOptions(share_system=is_shared, spread=60.0))
    assert (counts.requests, problems) == (sum(map(len, sessions)), [])
    before_of: dict[int, tuple[int, ...]] = {}
    contexts_of: dict[int, set[str | None]] = {}
    for request in requests:
        assert len(request.hash_ids) == 3
        for place, one in enumerate(request.hash_ids):
            assert before_of.setdefault(one, tuple(request.hash_ids[:place])) == tuple(request.hash_ids[:place])
            contexts_of.setdefault(one, set()).add(request.context)
            assert len(contexts_of[one]) == 1 or (is_shared and place < 2)


def _peak(folder: Path, spread: float) -> int:
    importer = Importer(ImportOptions(spread=spread))
    tracemalloc.start()
    try:
        read = sum(1 for _ in importer.read([str(folder)]))
        assert read == importer.counts.requests > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_depends_on_the_sessions_that_are_open_not_on_all(tmp_path: Path) -> None:
    """As many start in an hour."""
    few, many = agents(tmp_path / "few", 25), agents(tmp_path / "many", 200)
    assert _peak(many, 8 * 7200.0) < 3 * _peak(few, 7200.0)


def test_numbers_are_bounded_and_ids_stay_equal_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "MOST", 3)
    numbers = Numbers()
    first, second = numbers.of([900, 70, 5, 1, 0]), numbers.of([70, 1, 0, 900])
    assert first == [0, 1, 2, (1 << 52) + 1, 1 << 52]
    assert second == [first[1], first[3], first[4], first[0]]
