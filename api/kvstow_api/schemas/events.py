"""Which events are asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from kvstow_api.schemas.base import Query, names_in
from kvstow_api.views.events import BLOCK_EVENTS, EVENT_TYPES

_STANDARD = frozenset(EVENT_TYPES) - frozenset(BLOCK_EVENTS)


class EventsQuery(Query):
    types: Annotated[
        str,
        Field(
            description=f"Any of {', '.join(EVENT_TYPES)}, separated by commas; if empty, all but "
            f"{' and '.join(BLOCK_EVENTS)}. `lost` always comes",
            examples=["state,operation"],
        ),
    ] = ""
    recent: Annotated[
        int, Field(ge=0, le=1000, description="Begin with so many of the last events, unless Last-Event-ID is given")
    ] = 0

    @field_validator("types")
    @classmethod
    def _names_types(cls, value: str) -> str:
        names_in(value, EVENT_TYPES, "type")
        return value

    @property
    def wanted(self) -> frozenset[str]:
        return names_in(self.types, EVENT_TYPES, "type") or _STANDARD
