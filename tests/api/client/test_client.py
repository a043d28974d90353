"""The client against a real server, over TCP and over a Unix socket."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstow_api.client import ApiError, Client, Endpoint, routes
from kvstow_api.client.client import parse_events


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_client_asks_and_listens(serve: Any, ranks: Any, tmp_path: Path, transport: str) -> None:
    uds, token = tmp_path / "admin.sock", tmp_path / "token"
    token.write_text("s3cret")
    listeners = serve(uds=uds, token_file=token)
    with Client(f"unix:{uds}" if transport == "unix" else Endpoint(listeners.url, token="s3cret")) as kvstow:
        assert kvstow.call(routes.get_pool, pool="host").capacity_slots == 16
        kvstow.call(routes.start_drain)
        first = next(kvstow.events(["change"], recent=10))
        assert (first.data["method"], first.data["path"]) == ("PUT", "/v1/drain")


def test_a_stream_is_taken_up_where_it_broke_off(serve: Any, ranks: Any, tmp_path: Path) -> None:
    serve(uds=tmp_path / "admin.sock")
    with Client(f"unix:{tmp_path}/admin.sock") as kvstow:
        kvstow.call(routes.start_drain)
        first = next(kvstow.events(["change"], recent=10))
        kvstow.call(routes.end_drain)
        second = next(kvstow.events(["change"], after=first.id))
        assert (first.data["method"], second.data["method"]) == ("PUT", "DELETE")
        with pytest.raises(ApiError) as refused:
            next(kvstow.events(("nonsense",)))  # type: ignore[arg-type]
        assert refused.value.status == 422


def test_a_server_that_is_away_is_an_error_that_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        server = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(server) as kvstow, pytest.raises(ApiError, match=server) as caught:
            kvstow.call(routes.get_pool, pool="host")
    assert caught.value.problem is None


# httpcore leaves the socket that it could not connect to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_unix_socket_that_is_away_is_named_too(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/absent") as kvstow, pytest.raises(ApiError, match="absent"):
        kvstow.call(routes.get_pool, pool="host")


def test_a_server_that_is_silent_is_not_waited_for_for_ever() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout=0.05) as kvstow, pytest.raises(ApiError, match=r"did not answer within 0\.05 s"):
            kvstow.call(routes.get_pool, pool="host")


def test_the_error_survives_a_pipe_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ApiError("what", None)))
    assert (str(error), error.problem) == ("what", None)


def test_a_parser_makes_events_of_lines() -> None:
    lines = ["retry: 2000", "", ": words", "", "id: a-1-0", "event: state", 'data: {"state": "ready"}', ""]
    (event,) = parse_events(lines)
    assert (event.id, event.type, event.data) == ("a-1-0", "state", {"state": "ready"})


def test_the_client_loads_neither_pydantic_nor_fastapi() -> None:
    absent = ["pydantic", "fastapi", "starlette", "torch", "numpy", "prometheus_client", "uvicorn"]
    code = f"import sys, kvstow_api.client; print([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
