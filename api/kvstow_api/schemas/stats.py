"""Which counters are asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from kvstow_api.schemas.base import Query, names_in
from kvstow_api.views.stats import SECTIONS


class StatsQuery(Query):
    section: Annotated[str, Field(description=f"Any of {', '.join(SECTIONS)}, separated by commas; all if empty")] = ""

    @field_validator("section")
    @classmethod
    def _names_sections(cls, value: str) -> str:
        names_in(value, SECTIONS, "section")
        return value

    @property
    def sections(self) -> frozenset[str]:
        return names_in(self.section, SECTIONS, "section") or frozenset(SECTIONS)
