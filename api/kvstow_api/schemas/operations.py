"""Which operations are asked for, and for how long an answer may wait."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstow_api.schemas.base import Query
from kvstow_api.schemas.paging import PageQuery
from kvstow_api.views.operations import OperationKind, OperationState

WaitSeconds = Annotated[float, Field(ge=0, le=30)]


class OperationsQuery(PageQuery):
    kind: Annotated[OperationKind | None, Field(description="Only operations of this kind")] = None
    state: Annotated[OperationState | None, Field(description="Only operations in this state")] = None


class WorkQuery(Query):
    wait: Annotated[WaitSeconds, Field(description="Seconds to wait for the end before answering 202")] = 0.1


class OperationQuery(Query):
    wait: Annotated[WaitSeconds, Field(description="Seconds to wait for the end before answering")] = 0.0
