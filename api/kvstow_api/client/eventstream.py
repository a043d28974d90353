"""Parses server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kvstow_api.answers import EventType, EventView


@dataclass(frozen=True, slots=True)
class Subscription:
    """A stream of events of these types (if empty, the server's default), after the event with this id or, without
    one, from the last `recent` events on. `pool`: what is said of others is left out; events of blocks need it where
    there are several."""

    types: tuple[EventType, ...] = ()
    after: str | None = None
    recent: int = 0
    pool: str | None = None

    path = "/v1/events"

    @property
    def params(self) -> Mapping[str, str]:
        types = {"types": ",".join(self.types)} if self.types else {}
        pool = {"pool": self.pool} if self.pool is not None else {}
        return {**types, **pool, "recent": str(self.recent)}

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Accept": "text/event-stream", **({"Last-Event-ID": self.after} if self.after else {})}


class EventParser:
    """Turns the lines of a stream into events."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> EventView | None:
        """Takes a line without its end, returns the event that it completes. Raises `ValueError` for invalid JSON."""
        if line:
            name, _, value = line.partition(":")
            if name in ("id", "event", "data"):
                self._fields[name] = value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return EventView(id=fields.get("id", ""), type=fields.get("event", ""), data=json.loads(fields["data"]))
