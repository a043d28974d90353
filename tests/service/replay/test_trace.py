import io
import json
from pathlib import Path

import pytest

from kvstow.errors import InvalidRequestError
from kvstow_service.replay.trace import TraceRequest, parse_trace, read_trace

GOOD = '{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}'


def test_requests_come_back_as_they_were_written() -> None:
    request = TraceRequest(27, 700, 5, (4, 9))
    assert list(parse_trace([request.to_line().encode()], "t")) == [request]


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
