"""Dependencies of routes: the pool that a request means, the page of a list, and the refusal of everything that the
route does not define."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from kvstow.errors import ConflictError, NotFoundError
from kvstow_api.appstate import App
from kvstow_api.directory import NO_POOL, Directory, HostedPool

# -- pools ----------------------------------------------------------------------------------------------------------


def find_pool(directory: Directory, name: str) -> HostedPool:
    pool = directory.find_pool(name)
    if pool is None:
        names = [one.name for one in directory.pools()]
        there = f"there {'is' if len(names) == 1 else 'are'}: {', '.join(names)}" if names else NO_POOL
        raise NotFoundError(f"there is no pool {name!r}; {there}")
    return pool


def choose_pool(directory: Directory, name: str | None) -> HostedPool:
    """Return the pool of this name or, without a name, the only one. Raises `NotFoundError`, `ConflictError` if there
    is no pool at all, and a validation error if there are several and no name was given."""
    if name is not None:
        return find_pool(directory, name)
    pools = directory.pools()
    if len(pools) > 1:
        names = ", ".join(pool.name for pool in pools)
        message = f"the request has to name one of several pools: {names}"
        error = {"type": "missing", "loc": ("query", "pool"), "msg": message, "input": None}
        raise RequestValidationError([{**error, "ctx": {"allowed": names}}])
    if not pools:
        raise ConflictError(NO_POOL)
    return pools[0]


async def _any_pool(
    app: App, pool: Annotated[str | None, Query(description="Only this pool; without it, the whole host")] = None
) -> HostedPool | None:
    return None if pool is None else find_pool(app.directory, pool)


async def _chosen_pool(
    app: App,
    pool: Annotated[
        str | None, Query(description="Its name; needed only where the host has several pools", examples=["host"])
    ] = None,
) -> HostedPool:
    return choose_pool(app.directory, pool)


AnyPool = Annotated[HostedPool | None, Depends(_any_pool)]
"""The pool that a request names, or None if it names none."""
ChosenPool = Annotated[HostedPool, Depends(_chosen_pool)]
"""The pool that a request means: see `choose_pool`."""
Session = Annotated[str | None, Query(description="Only of this engine, by its id in `/v1/sessions`")]
Wait = Annotated[
    float,
    Query(ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for the end of the work before answering"),
]


# -- lists that come in pages ---------------------------------------------------------------------------------------


def token_of(position: int | None) -> str | None:
    """Return the page token that leads to `position`, or None for None, which stands for the end."""
    return None if position is None else f"p{position}"


def _position_of(token: str) -> int:
    """Return the number in `token`, or 0 if it is empty. Raises a validation error if it is no page token."""
    if token and not re.fullmatch(r"p\d{1,15}", token, re.ASCII):
        allowed = "the next_page_token of an earlier answer"
        raise PydanticCustomError("page_token", "this is not a page token; allowed: {allowed}", {"allowed": allowed})
    return int(token[1:] or 0)


def _check_token(token: str) -> str:
    _position_of(token)
    return token


class PageOfList(NamedTuple):
    size: int
    position: int
    """The number of the first item."""


async def _page(
    page_size: Annotated[int, Query(ge=1, le=1000, description="The most items to return")] = 100,
    page_token: Annotated[
        str, AfterValidator(_check_token), Query(description="`next_page_token` of the page before")
    ] = "",
) -> PageOfList:
    return PageOfList(page_size, _position_of(page_token))


Page = Annotated[PageOfList, Depends(_page)]


# -- what a route does not define -----------------------------------------------------------------------------------


async def _refuse_undefined(request: Request) -> None:
    """Refuse query parameters and a body that the route does not define, because a change must not ignore
    `?dry_run=true`. Repeated names are refused as well, because only the last value would count."""
    route, given = request.scope["route"], request.query_params.multi_items()
    unwanted: list[dict[str, Any]] = []
    known, counts = _query_names(route.dependant) if given else [], Counter(name for name, _ in given)
    unknown = f"Unknown query parameter; known: {', '.join(known)}" if known else "No query parameters are allowed here"
    for name, text in given:
        if name not in known:
            unwanted.append(_unwanted("query", name, unknown, text, known))
        elif counts[name] > 1:
            unwanted.append(_unwanted("query", name, "Allowed only once", text))
    if route.body_field is None and request.method != "GET" and (body := await request.body()):
        unwanted.append(_unwanted("body", "", "No body is allowed here", body.decode("utf-8", "replace")))
    if unwanted:
        raise RequestValidationError(unwanted)


def _query_names(dependant: Dependant) -> list[str]:
    inner = [name for one in dependant.dependencies for name in _query_names(one)]
    return [*inner, *(field.alias for field in dependant.query_params)]


def _unwanted(where: str, name: str, message: str, text: str, known: Sequence[str] = ()) -> dict[str, Any]:
    place = (where, name) if name else (where,)
    return {"type": "unwanted", "loc": place, "msg": message, "input": text, "ctx": {"allowed": ", ".join(known)}}


class StrictRouter(APIRouter):
    """A router whose routes refuse everything that they do not define. Operation ids are the names of the endpoints."""

    def __init__(self, **options: Any) -> None:
        strict = [Depends(_refuse_undefined)]
        super().__init__(dependencies=strict, generate_unique_id_function=lambda route: route.name, **options)
