"""Figures of an attached engine for vLLM's own metrics: what it moves itself, and whether it is attached."""

from __future__ import annotations

from typing import Any

from kvstow.stats import DIRECTIONS
from kvstow_service.connectors.engine_core.offloadmetrics import (
    ATTACH_STATE,
    ATTACHED,
    INFO,
    SESSIONS_LOST,
    info_labels,
)
from kvstow_service.connectors.vllm.attachedcontrol import AttachedControl


class AttachedFigures:
    """`Figures` of this engine's session. The service's own metrics have those of the whole pool. Used by the
    scheduler's thread."""

    def __init__(self, control: AttachedControl, slot_bytes: int, slot_tokens: int | None, *, replicated: bool) -> None:
        """`slot_bytes`: bytes of a slot on all ranks together. `replicated`: one rank stores for all."""
        self._control, self._slot_bytes, self._slot_tokens = control, slot_bytes, slot_tokens
        self._replicated = replicated
        self._slots, self._is_whole = 0, False
        self._num_ranks = max(1, round(slot_bytes / control.slot_bytes))

    def set_memory(self, slots: int, is_whole: bool) -> None:
        """`slots` of the pool can be used now. `is_whole`: no more slots will come."""
        self._slots, self._is_whole = slots, is_whole

    @property
    def open_transfers(self) -> int:
        return self._control.open_transfers

    def read(self) -> dict[str, Any]:
        control, values = self._control, dict[str, Any]()
        values["allocation_failure"] = control.refused_stores["dropped_cpu_full"]
        for direction in DIRECTIONS:
            stored_once = self._replicated and direction == "store"
            num_bytes = self._slot_bytes // self._num_ranks if stored_once else self._slot_bytes
            values[f"{direction}_bytes"] = control.moved_blocks[direction] * num_bytes
            values[f"{direction}_time"] = control.moved_seconds[direction]
        usable = max(1, self._slots)
        writing, reading = control.open_blocks("store"), control.open_blocks("load")
        values["cpu_cache_usage_perc"] = (writing + reading) / usable
        values["cpu_cache_write_usage_perc"] = writing / usable
        values["cpu_cache_read_usage_perc"] = reading / usable
        values[SESSIONS_LOST] = control.sessions_lost
        values[ATTACHED] = float(control.problem is None)
        state = control.state
        if state.state == "attached" and not self._slots:
            state = state._replace(state="no_memory")
        values[ATTACH_STATE] = state.labels()
        if self._is_whole:
            values[INFO] = info_labels(self._slots, self._slot_bytes, self._slot_tokens)
        return values
