"""The report of a rank."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from kvstow.messages import RankReport

REPORT_SCHEMA: dict[str, Any] = {
    **TypeAdapter(RankReport).json_schema(),
    "examples": [
        {
            "rank": 0,
            "boot_id": "6f1d2a9c",
            "sender": "c04e57d1",
            "number": 1,
            "state": "ready",
            "slot_bytes": 2097152,
            "pinned_slots": 4096,
            "target_slots": 4096,
            "pinned_bytes": 8589934592,
            "target_bytes": 8589934592,
        }
    ],
}
"""JSON schema of the body that `RankReport.from_json` reads."""
