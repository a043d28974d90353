"""What happened, as it happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvstow_api.views.base import View

EventType = Literal["state", "rank", "operation", "change", "stored", "removed", "lost"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
BLOCK_EVENTS: tuple[EventType, ...] = ("stored", "removed")
"""One for each batch of blocks: sent only to who asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView(View):
    """`id` resumes the stream after this event (Last-Event-ID). `data` by type:

    `state`: state, reason. `rank`: rank, state, error, boot_id. `operation`: id, kind, dry_run, state, error. `change`:
    actor, method, path, status, request_id. `stored`: keys. `removed`: keys, reason. `lost`: events that a late reader
    has missed, or null where an earlier life of the server had the id. All but `lost`, `stored` and `removed` have
    `time` as well.
    """

    id: str
    type: str
    data: dict[str, Any]
