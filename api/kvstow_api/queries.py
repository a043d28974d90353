"""The query parameters of the API, the tokens of lists that come in pages, the pool that a request means, and the
refusal of what a route does not define."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from kvstow.errors import ConflictError, NotFoundError
from kvstow.messages import Direction
from kvstow.status import SourceKind, SourceOrder, TransferState
from kvstow_api.answers import BLOCK_EVENTS, EVENT_TYPES, BlockState, OperationKind, OperationState
from kvstow_api.directory import NO_POOL, Directory, HostedPool

_TOKEN_BYTES = 6
_STANDARD_EVENTS = frozenset(EVENT_TYPES) - frozenset(BLOCK_EVENTS)

WaitSeconds = Annotated[float, Field(ge=0, le=30)]


class Query(BaseModel):
    """No unknown parameters. Text is converted, as a query has nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PoolQuery(Query):
    """Which pool is meant."""

    pool: Annotated[
        str | None, Field(description="Its name; needed only where the host has several pools", examples=["host"])
    ] = None


class SessionsQuery(Query):
    """Whose ranks or transfers are meant."""

    pool: Annotated[str | None, Field(description="Only of this pool")] = None
    session: Annotated[str | None, Field(description="Only of this engine, by its id in `/v1/sessions`")] = None


class ReadinessQuery(Query):
    """Whose readiness is meant."""

    pool: Annotated[str | None, Field(description="Only this pool; without it, the whole host")] = None


class SwitchQuery(Query):
    """Which pool a switch is for."""

    pool: Annotated[str | None, Field(description="Only this pool; without it, all pools and those to come")] = None


class DetachQuery(Query):
    """How a session ends."""

    kill: Annotated[bool, Field(description="Kill the engine's processes, too")] = False


def token_of(position: int | None) -> str | None:
    """The page token that leads to `position`; None for None, the end."""
    return None if position is None else base64.urlsafe_b64encode(position.to_bytes(_TOKEN_BYTES, "big")).decode()


def _position_of(token: str) -> int:
    """The number in `token`; 0 if it is empty. Raises a validation error for anything but a page token."""
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b"?"
    if token and len(raw) != _TOKEN_BYTES:
        allowed = "the next_page_token of an earlier answer"
        raise PydanticCustomError("page_token", "not a page token; allowed: {allowed}", {"allowed": allowed})
    return int.from_bytes(raw, "big")


def _check_token(token: str) -> str:
    _position_of(token)
    return token


class PageQuery(Query):
    """Which part of a list."""

    page_size: Annotated[int, Field(ge=1, le=1000, description="The most items to return")] = 100
    page_token: Annotated[
        str, AfterValidator(_check_token), Field(description="`next_page_token` of the page before")
    ] = ""

    @property
    def position(self) -> int:
        """The number in `page_token`."""
        return _position_of(self.page_token)


class ContextsQuery(PageQuery, PoolQuery):
    """Which contexts."""


class BlocksQuery(PageQuery):
    state: Annotated[BlockState | None, Field(description="Only blocks in this state")] = None
    namespace: Annotated[str | None, Field(description="Only blocks of this namespace of the pool")] = None


class SourcesQuery(Query):
    kind: Annotated[SourceKind | None, Field(description="Only sources of this kind")] = None
    by: Annotated[
        SourceOrder, Field(description="Of what those have most that are listed, the first before others")
    ] = "hits"


class OperationsQuery(PageQuery):
    pool: Annotated[str | None, Field(description="Only operations of this pool")] = None
    kind: Annotated[OperationKind | None, Field(description="Only operations of this kind")] = None
    state: Annotated[OperationState | None, Field(description="Only operations in this state")] = None


class WorkQuery(Query):
    wait: Annotated[WaitSeconds, Field(description="Seconds to wait for the end before answering 202")] = 0.1


class OperationQuery(Query):
    wait: Annotated[WaitSeconds, Field(description="Seconds to wait for the end before answering")] = 0.0


class TransfersQuery(SessionsQuery):
    direction: Annotated[Direction | None, Field(description="Only transfers of this direction")] = None
    state: Annotated[TransferState | None, Field(description="Only transfers in this state")] = None
    slowest: Annotated[int, Field(ge=1, le=1000, description="How many, of the oldest ones")] = 100


class EventsQuery(PoolQuery):
    types: Annotated[
        str,
        Field(
            description=f"Any of {', '.join(EVENT_TYPES)}, separated by commas; if empty, all but "
            f"{' and '.join(BLOCK_EVENTS)}. `lost` is always sent",
            examples=["state,operation"],
        ),
    ] = ""
    recent: Annotated[
        int, Field(ge=0, le=1000, description="Begin with this many of the last events, unless Last-Event-ID is given")
    ] = 0

    @field_validator("types")
    @classmethod
    def _names_types(cls, value: str) -> str:
        _names_in(value, EVENT_TYPES, "type")
        return value

    @property
    def wanted(self) -> frozenset[str]:
        return _names_in(self.types, EVENT_TYPES, "type") or _STANDARD_EVENTS


def _names_in(text: str, allowed: Collection[str], noun: str) -> frozenset[str]:
    """The names in `text`, separated by commas. Raises a validation error for one that is not `allowed`."""
    names = frozenset(filter(None, text.split(",")))
    if unknown := sorted(names - frozenset(allowed)):
        raise PydanticCustomError(
            "unknown_name",
            "there is no {noun} {unknown}; there are: {allowed}",
            {"noun": noun, "unknown": ", ".join(unknown), "allowed": ", ".join(allowed)},
        )
    return names


def find_pool(directory: Directory, name: str) -> HostedPool:
    """Raises `NotFoundError` if there is no pool of this name."""
    pool = directory.find_pool(name)
    if pool is None:
        raise NotFoundError(f"there is no pool {name!r}; " + _there_are(directory))
    return pool


def pool_if_any(directory: Directory, name: str | None) -> HostedPool | None:
    """The pool of this name; without a name, the only one, or None if there is none. Raises `NotFoundError`, and a
    validation error if there are several and no name was given."""
    if name is not None:
        return find_pool(directory, name)
    pools = directory.pools()
    if len(pools) > 1:
        names = ", ".join(pool.name for pool in pools)
        message = f"needed, as there are several pools; there are: {names}"
        error = {"type": "missing", "loc": ("query", "pool"), "msg": message, "input": None}
        raise RequestValidationError([{**error, "ctx": {"allowed": names}}])
    return pools[0] if pools else None


def choose_pool(directory: Directory, name: str | None) -> HostedPool:
    """As `pool_if_any`; raises `ConflictError` if there is no pool at all."""
    pool = pool_if_any(directory, name)
    if pool is None:
        raise ConflictError(NO_POOL)
    return pool


def _there_are(directory: Directory) -> str:
    names = [pool.name for pool in directory.pools()]
    if not names:
        return NO_POOL
    return f"there {'is' if len(names) == 1 else 'are'}: {', '.join(names)}"


# -- what a route does not define ------------------------------------------------------------------------------------


async def _refuse_undefined(request: Request) -> None:
    """Refuse query parameters and a body where the route has none: a change must not ignore `?dry_run=true`. Where it
    has some, their models refuse unknown names, but would take the last value of a name that is repeated."""
    route = request.scope["route"]
    unwanted: list[dict[str, Any]] = []
    if not route.dependant.query_params:
        message = "No query parameters are allowed here"
        unwanted += [_unwanted(("query", name), message, text) for name, text in request.query_params.items()]
    elif len(given := request.query_params.multi_items()) > len(request.query_params):
        repeated = {name for name in request.query_params if sum(name == one for one, _ in given) > 1}
        unwanted += [_unwanted(("query", name), "Allowed only once", text) for name, text in given if name in repeated]
    if route.body_field is None and request.method != "GET" and (body := await request.body()):
        unwanted.append(_unwanted(("body",), "No body is allowed here", body.decode("utf-8", "replace")))
    if unwanted:
        raise RequestValidationError(unwanted)


def _unwanted(where: tuple[str, ...], message: str, text: str) -> dict[str, Any]:
    return {"type": "unwanted", "loc": where, "msg": message, "input": text}


class StrictRouter(APIRouter):
    """Its routes refuse everything that they do not define. Operation ids are the names of the endpoints."""

    def __init__(self, **options: Any) -> None:
        strict = [Depends(_refuse_undefined)]
        super().__init__(dependencies=strict, generate_unique_id_function=lambda route: route.name, **options)
