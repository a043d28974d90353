"""Writes `kvstow_api/client/routes.py` from the routes: `python -m kvstow_api.routes.clienttable`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from starlette.responses import Response

from kvstow_api.answers import OperationView
from kvstow_api.client.client import ProbeResult
from kvstow_api.routes import ROUTERS

PATH = Path(__file__).parents[1] / "client" / "routes.py"

_HEAD = '''"""The routes of the API for `Client.call`. Written by `python -m kvstow_api.routes.clienttable`."""

from __future__ import annotations

from kvstow import stats, status
from kvstow_api import answers
from kvstow_api.client.client import ProbeResult, Route
'''
_TEXTS = {"/livez": ProbeResult, "/readyz": ProbeResult, "/startupz": ProbeResult, "/metrics": str}
_STREAMS = ("/v1/events", "/v1/pools/{pool}/trace")  # left out, as `Client.events` and `Client.record` read them


def table() -> str:
    lines = []
    for one in _routes():
        answer = "type(None)" if one.answer is NoneType else _named(one.answer)
        given = f'"{one.method}", "{one.path}", {answer}'
        if one.has_operation:  # on several lines, as ruff would format it
            union = f"Route[{answer} | {_named(OperationView)}]"
            lines.append(f"{one.name}: {union} = Route(\n    {given}, operation=True\n)")
        else:
            lines.append(f"{one.name} = Route({given})")
    return "\n".join([_HEAD, *lines, ""])


def _named(kind: type) -> str:
    module = kind.__module__.rpartition(".")[2]
    return kind.__name__ if module in ("builtins", "client") else f"{module}.{kind.__name__}"


class _ClientRoute(NamedTuple):
    """`answer` is the type of a route's answer. `has_operation`: the answer may be an operation, too."""

    name: str
    answer: type
    has_operation: bool
    method: str
    path: str


def _routes() -> Iterator[_ClientRoute]:
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    for route in (one for one in routes if one.include_in_schema or one.path in _TEXTS):
        (method,) = route.methods
        if route.path in _TEXTS:
            yield _ClientRoute(route.path.removeprefix("/"), _TEXTS[route.path], False, method, route.path)
        elif route.path.startswith("/v1/") and route.path not in _STREAMS:
            yield _ClientRoute(route.endpoint.__name__, _answer(route), 202 in route.responses, method, route.path)


def _answer(route: Any) -> type:
    kind = route.response_model or get_type_hints(route.endpoint)["return"]
    if get_origin(kind) is UnionType:
        kind = get_args(kind)[0]  # the answer to a change that is made, and not only planned
    return NoneType if issubclass(kind, Response) else kind


if __name__ == "__main__":
    PATH.write_text(table())
