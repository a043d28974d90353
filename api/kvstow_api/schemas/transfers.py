"""Which transfers are asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstow.messages import Direction
from kvstow_api.schemas.base import Query
from kvstow_api.views.transfers import TransferState


class TransfersQuery(Query):
    direction: Annotated[Direction | None, Field(description="Only transfers of this direction")] = None
    state: Annotated[TransferState | None, Field(description="Only transfers in this state")] = None
    slowest: Annotated[int, Field(ge=1, le=1000, description="How many, of those in flight for longest")] = 100
