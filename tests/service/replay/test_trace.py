import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.errors import InvalidRequestError
from kvstow_service.replay import trace as trace_module
from kvstow_service.replay.trace import MOST_BLOCKS, Runs, TraceRequest, events, parse_trace, read_trace

GOOD = '{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}'


def test_empty_lines_are_skipped(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"\n{GOOD}\n\n{GOOD}\n")
    assert len(read_trace(str(trace))) == 2


def test_the_limit_ends_the_reading_before_a_later_bad_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{GOOD}\nnonsense\n")
    assert len(read_trace(str(trace), limit=1)) == 1


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(GOOD.encode())))
    assert read_trace("-")[0].hash_ids == (4, 9)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": "0"}, "timestamp is '0'"),
        ({"input_length": 1.5}, "input_length is 1.5"),
        ({"output_length": -3}, "output_length is -3"),
        ({"output_length": True}, "output_length is True"),
        ({"hash_ids": 7}, "hash_ids is 7"),
        ({"hash_ids": [1, -2]}, "hash_ids holds -2"),
        ({"hash_ids": [1, "2"]}, "hash_ids holds '2'"),
        ({"hash_ids": [1 << 256]}, f"hash_ids holds {1 << 256}"),
        ({"hash_ids": [3, 1, 3]}, "hash_ids holds 3 twice"),
    ],
)
def test_a_bad_value_is_named_with_file_and_line(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{GOOD}\n{json.dumps(json.loads(GOOD) | change)}\n")
    with pytest.raises(InvalidRequestError) as raised:
        read_trace(str(trace))
    assert str(raised.value).startswith(f"{trace}:2: {complaint}")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "list found; a request is a JSON object"),
        (b'{"timestamp": 0, "hash_ids": []}', "input_length, output_length missing"),
        (b"\xff{}", "can't decode byte 0xff"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^<in>:1: ") as raised:
        list(parse_trace([line], "<in>"))
    assert complaint in str(raised.value)


def test_a_missing_file_is_an_error_of_the_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_trace(str(tmp_path / "none.jsonl"))


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidRequestError, match="holds no requests"):
        read_trace(str(tmp_path / "empty.jsonl"))


def test_equal_ids_give_equal_keys_and_others_differ() -> None:
    first, second = (TraceRequest(0, 1, 1, ids).keys() for ids in ((1, 2, 256), (1, 3)))
    assert first[0] == second[0]
    assert len({*first, *second}) == 4
    assert {len(key) for key in first} == {34}


def test_what_a_recorded_request_looked_up_is_read_and_written() -> None:
    line = b'{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [1, 2, 3], "looked_up": [1, 2]}'
    (request,) = parse_trace([line], "x")
    assert (request.looked_up, request.asked) == ((1, 2), (1, 2))
    assert list(parse_trace([request.to_line().encode()], "x")) == [request]
    assert "looked_up" not in request._replace(looked_up=None).to_line()
    assert request._replace(looked_up=None).asked == (0, 3)


@pytest.mark.parametrize("given", ["[2, 1]", "[0, 4]", "[-1, 1]", "[1]", "7", '["0", "1"]'])
def test_positions_outside_of_a_request_are_refused(given: str) -> None:
    line = f'{{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [1, 2, 3], "looked_up": {given}}}'
    with pytest.raises(InvalidRequestError, match=r"x:1: looked_up is .*allowed"):
        list(parse_trace([line.encode()], "x"))


# -- runs, ends and contexts -------------------------------------------------------------------------------------------

_ids = st.one_of(
    st.lists(st.integers(0, 60), unique=True),
    st.lists(st.integers(0, (1 << 256) - 1), unique=True),
    st.tuples(st.integers(0, 1 << 60), st.integers(0, 200)).map(lambda run: list(range(run[0], sum(run)))),
)
_texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=256)


@st.composite
def _requests(draw: st.DrawFn) -> TraceRequest:
    ids = draw(_ids)
    timestamp = draw(st.floats(0, 1e12) | st.integers(0, 10**12))
    end = draw(st.none() | st.floats(timestamp, 2e12))
    positions = sorted(draw(st.tuples(st.integers(0, len(ids)), st.integers(0, len(ids)))))
    looked_up = draw(st.sampled_from([None, (positions[0], positions[1])]))
    lengths = draw(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)))
    return TraceRequest(timestamp, *lengths, tuple(ids), looked_up, end, draw(_texts), draw(_texts))


@settings(deadline=None)
@given(_requests())
def test_any_request_comes_back_as_it_was_written(request: TraceRequest) -> None:
    line = request.to_line()
    assert "\n" not in line
    assert list(parse_trace([line.encode()], "t")) == [request]


@settings(deadline=None)
@given(_ids)
def test_runs_are_the_ids_that_they_are_made_of(ids: list[int]) -> None:
    runs = Runs.of(ids)
    assert (list(runs), len(runs)) == (ids, len(ids))
    assert runs == ids == list(runs[:])
    assert hash(runs) == hash(tuple(ids))
    assert runs != [*ids, 1 << 257]
    plain = json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ids})
    packed = json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "runs": runs.to_json()})
    assert list(parse_trace([plain.encode()], "t")) == list(parse_trace([packed.encode()], "t"))


def test_a_compressed_trace_is_read_whatever_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.jsonl").write_bytes(gzip.compress(f"{GOOD}\n{GOOD}\n".encode()))
    assert len(read_trace(str(tmp_path / "trace.jsonl"))) == 2
    stdin = io.TextIOWrapper(io.BytesIO(gzip.compress(GOOD.encode())))
    monkeypatch.setattr("sys.stdin", stdin)
    assert len(read_trace("-")) == 1
    assert not stdin.buffer.closed


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_compressed_trace_is_an_error_of_the_request(tmp_path: Path, damage: str) -> None:
    whole = bytearray(gzip.compress(f"{GOOD}\n".encode() * 50))
    if damage == "cut":
        del whole[-12:]
    else:
        whole[-6] ^= 1  # of the checksum
    (tmp_path / "trace.gz").write_bytes(whole)
    with pytest.raises(InvalidRequestError, match=r"trace.gz"):
        read_trace(str(tmp_path / "trace.gz"))


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "LONGEST_LINE", 100)
    (tmp_path / "trace").write_bytes(b"x" * 101)
    with pytest.raises(InvalidRequestError, match="a line of more than 100 bytes"):
        read_trace(str(tmp_path / "trace"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"runs": 7}, "runs is 7"),
        ({"runs": [1]}, r"runs is \[1\]"),
        ({"runs": [1, 0]}, "runs holds 1, 0"),
        ({"runs": [-1, 2]}, "runs holds -1, 2"),
        ({"runs": [1, "2"]}, "runs holds 1, '2'"),
        ({"runs": [(1 << 256) - 1, 2]}, "runs holds"),
        ({"runs": [5, 3, 1, 5]}, "runs holds 5 twice"),
        ({"runs": [0, MOST_BLOCKS + 1]}, "runs has more than 1,048,576 blocks"),
        ({"runs": [0, 10**30]}, "runs has more than 1,048,576 blocks"),
        ({"hash_ids": [1]}, "runs and hash_ids found"),
        ({"end": 26}, "end is 26; allowed: milliseconds, 27 or more"),
        ({"end": "27"}, "end is '27'"),
        ({"timestamp": 10**400}, "timestamp is 1"),
        ({"context": 7}, "context is 7"),
        ({"stop": "x" * 257}, "stop is 'xxx"),
        ({"context": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_bad_value_of_the_packed_form_is_named(change: dict[str, object], complaint: str) -> None:
    line = json.dumps({"timestamp": 27, "input_length": 1, "output_length": 1, "runs": [4, 2]} | change)
    with pytest.raises(InvalidRequestError, match=f"^t:1: .*{complaint}"):
        list(parse_trace([line.encode()], "t"))


def test_json_that_is_nested_too_deep_is_a_bad_line() -> None:
    with pytest.raises(InvalidRequestError, match=r"^t:1: "):
        list(parse_trace([b"[" * 100_000], "t"))


def test_requests_end_in_order_of_time_and_before_others_start_at_that_moment() -> None:
    first = TraceRequest(0, 1, 1, (1,), end=20)
    requests = [first, first._replace(timestamp=5, end=10), first._replace(timestamp=10, end=None)]
    assert list(events(requests)) == [
        (0, 0, False),
        (5, 1, False),
        (10, 1, True),
        (10, 2, False),
        (10, 2, True),
        (20, 0, True),
    ]
