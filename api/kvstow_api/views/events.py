"""The events of `GET /v1/events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

EventType = Literal["state", "session", "rank", "tier", "operation", "change", "stored", "removed", "lost"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
BLOCK_EVENTS: tuple[EventType, ...] = ("stored", "removed")
"""One for each batch of blocks: sent only to clients that ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """`id` resumes the stream after this event (Last-Event-ID). `data` by type:

    `state`: pool (null for a node), state, reason. `session`: pool, session, engine, model, state, reason; the
    state is `over` when none of its processes can reach the memory any more. `rank`: pool, session, rank, state,
    error, boot_id. `tier`: pool, namespace, store, state, reason, of the fleet tier of a namespace; the state is
    `over` when the store was detached or the namespace is gone. `operation`: id, pool, kind, dry_run, state, error.
    `change`: actor, method, path, status, request_id. `stored`: pool, keys. `removed`: pool, keys, reason. `lost`:
    the number of events that a slow reader has missed, or null if the id is of an earlier life of the server. All
    but `lost`, `stored` and `removed` also have `time`.
    """

    id: str
    type: str
    data: dict[str, Any]
