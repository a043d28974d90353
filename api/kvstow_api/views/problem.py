"""Errors as the API tells them (RFC 9457)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "type": "urn:kvstow:problem:invalid_config",
                    "title": "Unprocessable Content",
                    "status": 422,
                    "detail": "capacity_slots is 9000; allowed: 1 to 8192, the maximum of this host",
                    "instance": "5d0c9be2a47d1f0c",
                    "code": "invalid_config",
                    "errors": [
                        {
                            "field": "capacity_slots",
                            "message": "capacity_slots is 9000",
                            "value": 9000,
                            "allowed": "1 to 8192",
                        }
                    ],
                    "retry_after": None,
                }
            ]
        }
    }

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    errors: list[ProblemErrorView]
    retry_after: int | None
