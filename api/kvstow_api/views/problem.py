"""Errors as the API tells them (RFC 9457)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstow_api.views.base import View


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemErrorView(View):
    """One thing that is wrong: where, with which value, and what is allowed instead."""

    field: str
    message: str
    value: Any
    allowed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemView(View):
    """RFC 9457 problem details. `instance` is the request id, which the log has, too."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    errors: list[ProblemErrorView]
    retry_after: int | None
